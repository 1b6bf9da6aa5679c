"""ParticleNet and its data on a CUDA device: equal to the host's, compiled, in bfloat16, and without waiting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from adammcmc import AdamMCMC, Gaussian
from adammcmc.backends.streams import streams
from adammcmc.jets import Cloud, JetData, Jets, ParticleNet, ParticleNetLite, bundled, cloud_of, padded_inputs, read_jets
from adammcmc.jets.tagger import Tagger, Training
from adammcmc.samplers.stacked import StackedSampler, setup_of
from adammcmc.target.likelihood import Loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # torch's own, when it compiles
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]


@pytest.fixture(scope="module")
def jets() -> Jets:
    return read_jets(bundled("jets"), max_jets=600)


@pytest.fixture
def sync_mode() -> Iterator[None]:
    """Whatever a test sets, the next one begins as before."""
    before = torch.cuda.get_sync_debug_mode()
    yield
    torch.cuda.set_sync_debug_mode(before)


def there(cloud: Cloud, dtype: torch.dtype = torch.float32) -> Cloud:
    return Cloud(*(x.cuda().to(dtype) if x.is_floating_point() else x.cuda() for x in cloud))


def test_the_device_and_the_host_agree(jets: Jets) -> None:
    torch.manual_seed(0)
    net = ParticleNet().double().eval()
    cloud = cloud_of(jets[:64])
    here = net(Cloud(cloud.counts, cloud.points.double(), cloud.features.double(), cloud.neighbours))
    assert torch.allclose(net.cuda()(there(cloud, torch.float64)).cpu(), here, atol=1e-9)


def test_packed_and_padded_agree_in_single_precision(jets: Jets) -> None:
    torch.manual_seed(0)
    net = ParticleNet().cuda().eval()
    padded = net(*(x.cuda() for x in padded_inputs(jets[:64])))
    assert torch.allclose(net(there(cloud_of(jets[:64]))), padded, atol=2e-4)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("form", ["packed", "padded"])
def test_compiled_and_eager_agree(jets: Jets, form: str, autocast: torch.dtype | None) -> None:
    torch.manual_seed(0)
    net = ParticleNetLite(dropout=0.0).cuda().train()
    net.autocast = autocast
    compiled = torch.compile(net)
    for start in (0, 200, 300):  # batches with other numbers of particles
        part = jets[start : start + 100]
        if form == "packed":
            inputs: tuple[object, ...] = (there(cloud_of(part, num_neighbours=7)),)
        else:
            inputs = tuple(x.cuda() for x in padded_inputs(part))
        labels = part.kind.cuda()
        results = []
        for model in (net, compiled):
            net.zero_grad()
            loss = F.cross_entropy(model(*inputs), labels)
            loss.backward()
            results.append((loss.detach(), torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])))
        (loss_a, grad_a), (loss_b, grad_b) = results
        assert loss_a.dtype == torch.float32
        tolerance = 2e-3 if autocast is None else 5e-2  # neighbours that are nearly as near may change places
        assert float((loss_a - loss_b).abs()) < tolerance
        assert float((grad_a - grad_b).norm() / grad_a.norm()) < 10 * tolerance


@pytest.mark.usefixtures("sync_mode")
def test_batches_and_steps_do_not_wait(jets: Jets) -> None:
    data = JetData(jets, 128, device="cuda", num_neighbours=7)
    net = ParticleNetLite().cuda()
    adam = torch.optim.Adam(net.parameters(), fused=True)
    cloud, labels = next(data)
    F.cross_entropy(net(cloud), labels).backward()  # what is made once
    adam.step()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(6):  # over the end of an epoch
        cloud, labels = next(data)
        adam.zero_grad()
        F.cross_entropy(net(cloud), labels).backward()
        adam.step()


def test_a_batch_on_the_device_is_the_batch_on_the_host(jets: Jets) -> None:
    here, data = JetData(jets, 100), JetData(jets, 100, device="cuda")
    for _ in range(8):
        (cloud, labels), (cloud_there, labels_there) = next(here), next(data)
        assert torch.equal(labels, labels_there.cpu())
        assert all(torch.equal(a, b.cpu()) for a, b in zip(cloud, cloud_there, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_tagger_trains_samples_and_predicts(jets: Jets, compiled: bool) -> None:
    tagger = Tagger(Training("lite", epochs=4, batch_size=64), precision="bfloat16", compiled=compiled)
    assert tagger.device.type == "cuda"
    tagger.train(jets, progress=False)
    posterior = tagger.sample(jets, batch_size=64, burn_in=5, gap=2, num_draws=3, progress=False)
    prediction = tagger.predict(posterior, jets[:200], progress=False)
    assert prediction.mean.shape == (200, 2)
    assert float(((prediction.mean[:, 1] > 0.5) == (jets[:200].kind == 1)).float().mean()) > 0.75


def test_chains_of_jets_run_at_once_without_waiting(jets: Jets, sync_mode: None) -> None:
    """A stack of chains over clouds: neighbours, batch statistics and dropout of each chain on the device."""
    torch.manual_seed(0)
    net = ParticleNetLite().cuda().train()
    data = JetData(jets, 64, device="cuda", num_neighbours=7, capacity="auto")  # one shape, so that steps are captured
    sampler = AdamMCMC(net.named_parameters(), lr=1e-4, sigma=1e-3, sigma_along=2.0, num_data=len(jets), prior=Gaussian())
    setups = [setup_of(sampler, net)] * 5
    stack = StackedSampler(sampler, net, Loss(F.cross_entropy), setups, streams(range(5), torch.device("cuda")))
    stack.try_out(next(data))
    for _ in range(8):
        stack.step(next(data))
    batches = [next(data) for _ in range(25)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for batch in batches:
        stack.step(batch)
    torch.cuda.set_sync_debug_mode("default")
    assert float(stack.mean_acceptance_rate.min()) > 0
    assert len(set(stack.draws()["edge_convs.0.bns.0.running_mean"].double().sum(1).tolist())) > 1
