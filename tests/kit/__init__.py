"""What tests share: the oracle, ranks, models, walks, the simulated device.  tests/README.md introduces each."""
