"""More than one process is refused everywhere: ranks that share a chain would drift apart unnoticed."""

from __future__ import annotations

import os
import subprocess
import sys
import timeit
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import adammcmc
from adammcmc import ManyProcesses
from adammcmc.samplers.processes import check_one_process
from tests.optimizers import OPTIMIZERS, X, Y, adam_mcmc, closure, network

RANK = """
import sys, torch, torch.distributed as dist, torch.nn.functional as F
import adammcmc
from adammcmc import ManyProcesses
from tests.optimizers import X, Y, adam_mcmc, closure, network, underdamped

model = network()
early = adam_mcmc(model)
early.step(closure(model))
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
kernel = adammcmc.kernels.mala(0.1)
density = lambda x: -x.square().sum(1)
before = [p.detach().clone() for p in model.parameters()]
for call in (
    lambda: early.step(closure(model)),
    lambda: adam_mcmc(model),
    lambda: underdamped(model, fixed_data=True),
    lambda: adammcmc.sample(model, (X, Y), F.cross_entropy, num_draws=1),
    lambda: adammcmc.sample(model, (X, Y), F.cross_entropy, num_draws=1, num_chains=2, stacked=True),
    lambda: adammcmc.sample_density(density, torch.zeros(2, 1), kernel, num_steps=2),
    lambda: adammcmc.warm_up(density, torch.zeros(2, 1), kernel),
):
    try:
        call()
    except ManyProcesses as error:
        assert "one of 2" in str(error) and "drift apart" in str(error)
    else:
        raise SystemExit("accepted")
assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
dist.destroy_process_group()
early.step(closure(model))  # alone again
"""


def test_two_ranks_are_refused_by_every_api(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "store")], env=os.environ) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]


def test_the_check_costs_nothing_at_a_step() -> None:
    best = min(timeit.repeat(check_one_process, number=1000, repeat=5)) / 1000
    assert best < 1e-5  # 0.2 microseconds; a busy machine takes longer


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_group_of_one_samples_but_not_through_ddp() -> None:
    model = network()
    wrapped = nn.parallel.DistributedDataParallel(model)
    for optimizer in OPTIMIZERS.values():
        optimizer(model, fixed_data=True).step(closure(model))
    with pytest.raises(ManyProcesses, match=r"model\.module"):
        adammcmc.sample(wrapped, (X, Y), F.cross_entropy, num_draws=1)
    with pytest.raises(ManyProcesses, match="DistributedDataParallel"):
        adammcmc.sample(nn.Sequential(wrapped), (X, Y), F.cross_entropy, num_draws=1)
    sampler = adam_mcmc(model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ManyProcesses, match="DistributedDataParallel"):
        sampler.step(closure(wrapped))  # only the closure knows of it
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.usefixtures("alone")
def test_sharded_parameters_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh))
    with pytest.raises(ManyProcesses, match="DTensor"):
        adammcmc.AdamMCMC([parameter], num_data=10, sigma=0.1)
    model = fully_shard(network(), mesh=mesh)
    with pytest.raises(ManyProcesses, match="DTensor"):
        adam_mcmc(model)
    with pytest.raises(ManyProcesses, match="FSDP"):
        adammcmc.sample(model, (X, Y), F.cross_entropy, num_draws=1)
