from .fixtures import cu, sim, sim_device, simulator

__all__ = ["cu", "sim", "sim_device", "simulator"]
