"""What only a real NVIDIA GPU can show: the machine code of the kernels, real streams, real memory, real launches.

`make gpu` runs these and makes it an error when there is no GPU; elsewhere they are skipped.  Everything that does not need
the device itself is tested on the simulated driver.  To see that the tests themselves are in order, `DDP_MP_TEST_DEVICE=cpu`
runs those that have a meaning on a CPU, and `DDP_MP_TEST_DEVICE=simulated` runs them on the simulated driver.
"""

import copy
import gc
import os

import pytest
import torch
import torch.distributed as dist
from kit.inside import _C
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_mp
from ddp_mp.tools.upstream import silent_device_events

pytestmark = pytest.mark.gpu
NAME = os.environ.get("DDP_MP_TEST_DEVICE", "cuda")
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
PAIRS = [(a, b) for a in FLOATS for b in FLOATS if a != b]
POLICY = ddp_mp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
needs_cuda = pytest.mark.skipif(NAME != "cuda", reason="asks the CUDA runtime")


#: The simulated device interprets every instruction, so it is given less.
OFFSETS = range(18) if NAME != "simulated" else (0, 1, 9)
LENGTHS = [0, 1, 7, 64, 65, 1023, 4097, 40000] if NAME != "simulated" else [0, 1, 7, 1023]
LARGE = 1 << 24 if NAME != "simulated" else 1 << 14


@pytest.fixture
def place():
    """The GPU, or the CPU where it stands in; never simulated."""
    if NAME != "cuda":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    missing = pytest.fail if os.environ.get("DDP_MP_REQUIRE_GPU") == "1" else pytest.skip
    return missing("no NVIDIA GPU that PyTorch can use")


@pytest.fixture
def device(place):
    if NAME != "simulated":
        yield place
        return
    from kit.simulated import simulated_device

    with simulated_device():
        yield place


@pytest.fixture(scope="module")
def group():
    if NAME == "cuda" and not torch.cuda.is_available():
        yield  # the device says what that means
        return
    backend = "nccl" if NAME == "cuda" and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bit for bit, where any NaN is as good as another."""
    assert got.dtype == want.dtype
    nan = want.isnan()
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[want.element_size()]
    return bool(torch.equal(nan, got.isnan()) and torch.equal(got.view(whole)[~nan], want.view(whole)[~nan]))


def random_bits(count: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Any bit pattern: subnormals, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-(2**63), 2**63 - 1, (count * dtype.itemsize // 8 + 1,), generator=generator)
    return integers.view(torch.uint8)[: count * dtype.itemsize].view(dtype).to(device)


# --- kernels -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_cast_kernel_any_bits_and_alignment_equals_to(device, source, target):
    data = random_bits(1 << 16, source, device)
    for offset in OFFSETS:
        for length in LENGTHS:
            src = data[offset : offset + length]
            room = torch.full((length + 64,), 7.0, dtype=target, device=device)
            at = 17 - offset
            _C.cast(src, room[at : at + length])
            assert same_bits(room[at : at + length], src.to(target)), (offset, length)
            assert (room[:at] == 7).all(), (offset, length)
            assert (room[at + length :] == 7).all(), (offset, length)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16], ids=str)
def test_cast_kernel_every_upper_half_of_float32_equals_to(device, target):
    # All values of the upper 16 bits with lower halves around the points where rounding turns.
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    for lower in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF) if NAME != "simulated" else (0x8000,):
        bits = upper + lower
        src = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32).to(device)
        dst = torch.empty_like(src, dtype=target)
        _C.cast(src, dst)
        assert same_bits(dst, src.to(target)), hex(lower)


def test_cast_kernel_large_and_many_equals_to(device):
    sizes = [0, 1, 3, 255, 256, 257, LARGE >> 12, (LARGE >> 4) + 3] * 20 + [LARGE + 5]
    sources = [random_bits(n, torch.float32, device, seed=i) for i, n in enumerate(sizes)]
    targets = [torch.empty(n, dtype=torch.bfloat16, device=device) for n in sizes]
    _C.fuse(sources, [None] * len(sizes), targets, 1.0)
    for src, dst in zip(sources, targets, strict=True):
        assert same_bits(dst, src.to(torch.bfloat16))


@needs_cuda
@pytest.mark.long
def test_cast_kernel_beyond_32_bits_of_elements_equals_to(device):
    count = (1 << 32) + 11
    if torch.cuda.mem_get_info(device)[0] < count * 5:
        pytest.skip("needs 20 GiB of free GPU memory")
    src = torch.zeros(count, dtype=torch.float16, device=device)
    src[-16:] = torch.arange(1.0, 17.0)
    dst = torch.full((count,), 3.0, dtype=torch.bfloat16, device=device)
    _C.cast(src, dst)
    assert torch.equal(dst[-16:].float().cpu(), torch.arange(1.0, 17.0))
    assert dst[:-16].count_nonzero() == 0


# --- training ------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Several layers, one of them used twice, without operations that add up in an arbitrary order."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.again = nn.Linear(width, width)
        self.again.weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return self.again(self.norm(x))


def both(device: torch.device, options: ddp_mp.Options | None = None, low_dtype: torch.dtype = torch.bfloat16, **wrapper):
    """(patched wrapper, its module, masters by hand, low-precision copy by hand)"""
    torch.manual_seed(0)
    module = Tied().to(device)
    masters = copy.deepcopy(module)
    low = copy.deepcopy(module).to(low_dtype)
    precision = ddp_mp.MixedPrecision(param_dtype=low_dtype, reduce_dtype=torch.float32)
    ddp = ddp_mp.patch(DistributedDataParallel(module, **wrapper), mixed_precision=precision, options=options)
    return ddp, module, masters, low


def steps_are_equal(device, ddp, module, masters, low, steps: int = 6) -> None:
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (module, masters))
    for step in range(steps):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(device)
        ddp(x).float().square().mean().backward()
        with torch.no_grad():
            for p, q in zip(masters.parameters(), low.parameters(), strict=True):
                q.copy_(p)
                q.grad = None
        low(x.to(torch.bfloat16)).float().square().mean().backward()
        for (name, p), q, lows in zip(module.named_parameters(), masters.parameters(), low.parameters(), strict=True):
            q.grad = lows.grad.float()
            assert p.dtype == torch.float32, name
            assert torch.equal(p.grad, q.grad), (step, name)
        ours.step(), theirs.step()
        ours.zero_grad(), theirs.zero_grad()


OPTIONS = {
    "wait root": {"wait": "root"},
    "wait module": {"wait": "module"},
    "prefetch": {"prefetch": True},
    "reuse": {"reuse_unchanged": True},
    "prefetch and reuse": {"prefetch": True, "reuse_unchanged": True, "wait": "module"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_training_equals_masters_by_hand(device, group, name):
    steps_are_equal(device, *both(device, ddp_mp.Options(first_bucket_mb=0.01, bucket_mb=0.02, **OPTIONS[name])))


@pytest.mark.parametrize("wrapper", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_training_with_an_option_of_the_wrapper_equals_masters_by_hand(device, group, wrapper):
    steps_are_equal(device, *both(device, **wrapper))


def test_accumulation_under_no_sync_equals_masters_by_hand(device, group):
    ddp, module, _, low = both(device)
    for first in (0, 10):  # a second round meets the buckets of the first one
        inputs = [torch.randn(32, 64, generator=torch.Generator().manual_seed(first + i)).to(device) for i in range(3)]
        with ddp.no_sync():
            for x in inputs[:2]:
                ddp(x).float().square().mean().backward()
        ddp(inputs[2]).float().square().mean().backward()
        due = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in low.named_parameters()}
        for x in inputs:
            low.zero_grad()
            low(x.to(torch.bfloat16)).float().square().mean().backward()
            for name, p in low.named_parameters():
                due[name] += p.grad.float()
        for name, p in module.named_parameters():
            assert torch.equal(p.grad, due[name]), name
        ddp.zero_grad()


def test_float16_with_a_gradient_scaler_equals_masters_by_hand(device, group):
    ddp, module, masters, low = both(device, low_dtype=torch.float16)
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0, growth_interval=1000)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, masters))
    for step in range(4):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(device)
        scaler.scale(ddp(x).float().square().mean()).backward()
        scaler.unscale_(ours)
        with torch.no_grad():
            for p, q in zip(masters.parameters(), low.parameters(), strict=True):
                q.copy_(p)
                q.grad = None
        (low(x.to(torch.float16)).float().square().mean() * 256.0).backward()
        for (name, p), q, lows in zip(module.named_parameters(), masters.parameters(), low.parameters(), strict=True):
            q.grad = lows.grad.float() / 256.0
            assert torch.equal(p.grad, q.grad), (step, name)
        scaler.step(ours), scaler.update(), theirs.step()
        ours.zero_grad(), theirs.zero_grad()
        for (name, p), q in zip(module.named_parameters(), masters.parameters(), strict=True):
            assert torch.equal(p, q), (step, name)


def test_training_on_pytorch_hooks_above_our_root_hook_equals_masters_by_hand(place, group):
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).to(place)
    low = copy.deepcopy(module).to(torch.bfloat16)
    with silent_device_events():
        ddp = ddp_mp.patch(DistributedDataParallel(module, mixed_precision=POLICY), options=ddp_mp.Options(hooks="root"))
        for step in range(3):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(place)
            ddp(x).float().square().mean().backward()
            low.zero_grad()
            low(x.to(torch.bfloat16)).float().square().mean().backward()
            # PyTorch's first gradients are memory that nobody filled.
            for (name, p), q in zip(module.named_parameters(), low.parameters(), strict=True):
                assert p.dtype == torch.float32, name
                assert step == 0 or torch.equal(p.grad, q.grad.float()), (step, name)
            ddp.zero_grad()


@needs_cuda
def test_training_on_another_stream_equals_masters_by_hand(device, group):
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        steps_are_equal(device, *both(device))
    torch.cuda.current_stream(device).wait_stream(stream)


@needs_cuda
def test_backward_on_another_stream_equals_masters_by_hand(device, group):
    ddp, module, _, low = both(device)
    stream = torch.cuda.Stream(device)
    for seed in range(4):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).to(device)
        loss = ddp(x).float().square().mean()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            loss.backward()
        torch.cuda.current_stream(device).wait_stream(stream)
        low.zero_grad()
        low(x.to(torch.bfloat16)).float().square().mean().backward()
        for (name, p), q in zip(module.named_parameters(), low.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad.float()), (seed, name)
        ddp.zero_grad()


@needs_cuda
@pytest.mark.parametrize("wait", ["root", "module"])
def test_forward_after_a_late_write_sees_it(device, group, wait):
    # The write waits behind a long kernel; a cast that did not wait for the stream would read the old value.
    module = nn.Linear(256, 256, bias=False).to(device)
    options = ddp_mp.Options(wait=wait)
    ddp = ddp_mp.patch(DistributedDataParallel(module), mixed_precision=POLICY, options=options)
    x = torch.ones(1, 256, device=device)
    for value in (1.0, 2.0, 3.0):
        torch.cuda._sleep(50_000_000)
        with torch.no_grad():
            module.weight.fill_(value)
        out = ddp(x)
        assert (out.float() == 256 * value).all(), value
        out.sum().backward()
        assert (module.weight.grad == 1).all()
        module.weight.grad = None


@needs_cuda
@pytest.mark.parametrize("find_unused", [False, True])
def test_step_after_warm_up_never_blocks_the_host(device, group, find_unused):
    ddp, module, *_ = both(device, find_unused_parameters=find_unused)
    x = torch.randn(32, 64, device=device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step() -> None:
        ddp(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(), step()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@needs_cuda
def test_step_after_a_long_kernel_returns_before_it_ends(device, group):
    ddp, *_ = both(device)
    x = torch.randn(32, 64, device=device)
    for _ in range(2):
        ddp(x).float().square().mean().backward()
    torch.cuda.synchronize(device)
    torch.cuda._sleep(2_000_000_000)
    ddp(x).float().square().mean().backward()
    assert not torch.cuda.current_stream(device).query(), "something waited for the device"
    torch.cuda.synchronize(device)


@needs_cuda
def test_low_precision_memory_after_backward_is_given_back(device, group):
    module = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).to(device)
    ddp = ddp_mp.patch(DistributedDataParallel(module), mixed_precision=POLICY)
    size = sum(p.numel() for p in module.parameters())
    x = torch.randn(4, 1024, device=device)
    for _ in range(3):
        ddp(x).float().square().mean().backward()
        ddp.zero_grad()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    with torch.no_grad():
        ddp(x)
    torch.cuda.synchronize(device)
    assert torch.cuda.memory_allocated(device) - before < size // 10
    # Masters of 4 bytes an element, and little more: no copies, no gradients, no buckets that nobody asked for.
    assert ddp_mp.stats(ddp).low_bytes == 0


@needs_cuda
def test_memory_over_fifty_steps_stays_what_it_was(device, group):
    ddp, module, *_ = both(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    x = torch.randn(32, 64, device=device)
    held = []
    for _ in range(50):
        ddp(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        torch.cuda.synchronize(device)
        held.append(torch.cuda.memory_allocated(device))
    assert len(set(held[5:])) == 1, held


@needs_cuda
def test_launches_of_a_forward_are_one_a_bucket(device, group):
    from torch.profiler import ProfilerActivity, profile

    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(40))).to(device)
    ddp = ddp_mp.patch(DistributedDataParallel(module), mixed_precision=POLICY)
    x = torch.randn(4, 512, device=device)
    with torch.no_grad():
        ddp(x)
        before = ddp_mp.stats(ddp)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            ddp(x)
            torch.cuda.synchronize(device)
    after = ddp_mp.stats(ddp)
    assert after.launches - before.launches == after.buckets
    kernels = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and "mp_" in e.name]
    assert len(kernels) in (0, after.buckets), kernels  # 0: this profiler does not see launches through the driver


@needs_cuda
def test_cast_kernel_in_a_captured_graph_runs_again(device):
    src = torch.randn(100_003, device=device)
    dst = torch.empty_like(src, dtype=torch.bfloat16)
    _C.cast(src, dst)  # loads the kernels: not in a capture
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _C.cast(src, dst)
    for seed in range(3):
        src.copy_(torch.randn(100_003, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.cuda.synchronize(device)
        assert torch.equal(dst, src.to(torch.bfloat16)), seed


@needs_cuda
@pytest.mark.parametrize("wait", ["root", "module"])
def test_forward_and_backward_in_one_captured_graph_run_again(device, group, wait):
    """Casts, waits, packing, reduction and hand-over are all in the graph; masters and input are what it reads."""
    ddp, module, masters, low = both(device, ddp_mp.Options(wait=wait, first_bucket_mb=0.01, bucket_mb=0.02))
    x = torch.randn(32, 64, device=device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):  # loads kernels, makes streams and communicators, fills pools: not in a capture
            ddp(x).float().square().mean().backward()
            ddp.zero_grad(set_to_none=True)
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # Other threads, NCCL's watchdog for one, may ask about their own events meanwhile.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        ddp(x).float().square().mean().backward()
    grads = [p.grad for p in module.parameters()]
    for seed in range(3):
        with torch.no_grad():
            x.copy_(torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)))
            for p, q, r in zip(module.parameters(), masters.parameters(), low.parameters(), strict=True):
                p.mul_(-0.5)  # an old copy would not be near
                q.copy_(p)
                r.copy_(p)
                r.grad = None
        graph.replay()
        low(x.to(torch.bfloat16)).float().square().mean().backward()
        torch.cuda.synchronize(device)
        for (name, p), grad, r in zip(module.named_parameters(), grads, low.parameters(), strict=True):
            assert p.grad is grad, name
            assert p.dtype == torch.float32, name
            torch.testing.assert_close(grad, r.grad.float(), rtol=0.02, atol=1e-6 + 0.02 * float(r.grad.abs().max()), msg=name)
    ddp.zero_grad(set_to_none=True)
    steps_are_equal(device, ddp, module, masters, low, steps=2)  # outside the graph, which filled the tables there


def captured(device: torch.device, ddp: nn.Module, x: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A forward and a backward in a graph, after three others on the stream that is captured."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            ddp(x).float().square().mean().backward()
            ddp.zero_grad(set_to_none=True)
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        ddp(x).float().square().mean().backward()
    return graph


@needs_cuda
def test_unpatch_after_a_captured_step_gives_the_model_back(device, group):
    ddp, module, *_ = both(device)
    graph = captured(device, ddp, torch.randn(32, 64, device=device))
    graph.replay()
    torch.cuda.synchronize(device)
    ddp_mp.unpatch(ddp)
    assert not ddp_mp.is_patched(ddp)
    ddp.zero_grad(set_to_none=True)
    ddp(torch.randn(32, 64, device=device)).square().mean().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in module.parameters())


@needs_cuda
@pytest.mark.parametrize("name", OPTIONS)
def test_captured_step_with_options_computes_with_the_masters_of_now(device, group, name):
    ddp, module, _, low = both(device, ddp_mp.Options(**OPTIONS[name]))
    x = torch.randn(32, 64, device=device)
    graph = captured(device, ddp, x)
    for factor in (-0.5, 0.25):
        with torch.no_grad():
            for p, q in zip(module.parameters(), low.parameters(), strict=True):
                p.mul_(factor)  # an old copy would not be near
                q.copy_(p)
                q.grad = None
        graph.replay()
        low(x.to(torch.bfloat16)).float().square().mean().backward()
        torch.cuda.synchronize(device)
        for (what, p), q in zip(module.named_parameters(), low.parameters(), strict=True):
            torch.testing.assert_close(
                p.grad, q.grad.float(), rtol=0.02, atol=1e-6 + 0.02 * float(q.grad.abs().max()), msg=what
            )


# --- compiled ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_model_gives_nearly_the_gradients_of_one_that_is_not(place, group, mode):
    ddp, module, masters, _ = both(place)
    plain = ddp_mp.patch(DistributedDataParallel(masters), mixed_precision=POLICY)
    compiled = torch.compile(ddp, mode=mode)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (module, masters))
    try:
        for step in range(6):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(place)
            for model in (compiled, plain):
                model(x).float().square().mean().backward()
            for (name, p), q in zip(module.named_parameters(), masters.parameters(), strict=True):
                assert p.dtype == p.grad.dtype == torch.float32, name
                off = float((p.grad - q.grad).abs().max()) / float(q.grad.abs().max())
                assert off < 0.05, (step, name, off)
            ours.step(), theirs.step()
            ours.zero_grad(), theirs.zero_grad()
    finally:
        torch._dynamo.reset()


@needs_cuda
def test_build_info_on_a_gpu_says_so(device, group):
    ddp, *_ = both(device)
    ddp(torch.randn(2, 64, device=device)).sum().backward()
    assert ddp_mp.stats(ddp).backend == "cuda"
    assert ddp_mp.stats(ddp).fallbacks == 0
    assert ddp_mp.build_info()["cuda_driver"] > 0
