"""Algorithm 1 in one pass over the parameters on the CPU: `onepass.c`, compiled when it is first asked for.

What `onepass` is for the GPU, with the same noise (`philox`): the C kernel proposes; the decision, a few numbers of one chain,
is made here. It is an option (`AdamMCMC(fused=True)`), because its random numbers are not those of torch's generator, so that
a seed would mean another chain on a machine without a compiler.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adammcmc.backends.fused import Settings

__all__ = ["CannotCompile", "CompiledOnePass", "library"]

_CHUNK = 4096  # weights that a thread works on at once; a multiple of 256
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fPIC")
_THREADS = 1 << 15  # weights for each thread at least


class CannotCompile(RuntimeError):
    """There is no compiler, or it failed."""


@functools.cache
def library() -> Any:
    """The C function, compiled once in each process.

    It takes a quarter of a second, and nothing is kept on disk: a library in a cache could be another's, or cut off.
    """
    source = Path(__file__).with_name("onepass.c")
    compiler = os.environ.get("CC") or next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        raise CannotCompile("there is no C compiler (cc, gcc or clang; or set CC)")
    # torch's own threads, if it has them: two pools of threads would fight for the cores
    threads = next(iter(sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))), None)
    flags = (*_FLAGS, *(("-fopenmp",) if threads is not None else ("-fopenmp-simd",)))
    try:
        with tempfile.TemporaryDirectory(prefix="adammcmc-") as work:  # of this user alone
            part, whole = Path(work) / "onepass.o", Path(work) / "onepass.so"
            _run([*compiler.split(), *flags, "-c", str(source), "-o", str(part)])
            # linked without -fopenmp: the symbols are those of torch's libgomp, which is loaded first
            _run([*compiler.split(), "-shared", str(part), "-o", str(whole), "-lm"])
            if threads is not None:
                ctypes.CDLL(str(threads), mode=ctypes.RTLD_GLOBAL)
            propose = ctypes.CDLL(str(whole)).propose  # stays loaded when its file is gone
    except OSError as error:  # no such compiler, no place for temporary files, or none whose code may run
        raise CannotCompile(f"{compiler} cannot be run, or its result cannot be loaded: {error}") from error
    pointer, whole_number = ctypes.c_void_p, ctypes.c_int64
    propose.argtypes = [pointer] * 5 + [whole_number] * 3
    propose.argtypes += [pointer, ctypes.c_uint64, ctypes.c_float, ctypes.c_double, pointer, ctypes.c_int32]
    propose.restype = None
    return propose


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotCompile(f"{command[0]} failed: {done.stderr.strip().splitlines()[-1:]}")


class _Table(NamedTuple):
    """Gradients, and where they are."""

    tensors: list[Tensor]
    addresses: Tensor


class CompiledOnePass:
    """One chain of Algorithm 1 over parameters that stay where they are: `onepass.OnePass` for the CPU, with its arguments."""

    def __init__(
        self,
        params: Sequence[Tensor],
        exp_avg: Sequence[Tensor],
        exp_avg_sq: Sequence[Tensor],
        backup: Sequence[Tensor],
        *,
        counts: Sequence[int],
        num_steps: int,
        frozen_at: Tensor,
        sum_rates: Tensor,
        fixed: bool,
    ) -> None:
        self._propose = library()
        self._params, self.backup, self.fixed = list(params), list(backup), fixed
        self.num_tensors, self.largest = len(params), max(p.numel() for p in params)
        self._held = self._params, list(exp_avg), list(exp_avg_sq), self.backup
        self._counts, self.clock = [int(k) for k in counts], num_steps
        self._frozen_at, self._sum_rates = frozen_at, sum_rates
        sizes = [p.numel() for p in params]
        groups = [-(-size // 4) for size in sizes]
        chunks = [(t, c) for t, size in enumerate(sizes) for c in range(-(-size // _CHUNK))]
        self._num_weights, self._num_chunks = sum(sizes), len(chunks)
        self._places = torch.tensor([[x.data_ptr() for x in group] for group in self._held])
        self._sizes, self._bases = torch.tensor(sizes), torch.tensor([sum(groups[:t]) for t in range(len(sizes))])
        self._chunks = torch.tensor(chunks, dtype=torch.int32)
        self._coefficients = torch.zeros(len(sizes), 8, dtype=torch.float64)
        self._sums = torch.zeros(5 * (len(chunks) + 1), dtype=torch.float64)
        self._settings: Settings | None = None
        self._z = self._log_uniform = 0.0
        self._is_moved = False
        self.no_prior = torch.zeros(1, dtype=torch.float64)
        self.first_row = torch.zeros(1, dtype=torch.int64)

    def tell(self, settings: Settings) -> None:
        """The present settings."""
        self._settings = settings

    def point_at(self, gradients: Sequence[Tensor]) -> _Table:
        """A table of addresses of gradients, contiguous float32."""
        return _Table(list(gradients), torch.tensor([g.data_ptr() for g in gradients]))

    def put_back(self) -> None:
        """theta to its place, whatever was proposed."""
        torch._foreach_copy_(self._params, self.backup)

    def propose(self, key: Tensor, scale: float, gradients: _Table, losses: Tensor) -> None:
        """theta -> tau, in place, if the losses at theta are numbers."""
        s, bits = self._settings, int(key) % (1 << 64)
        assert s is not None
        a, b, c, d = _philox(bits, 1)
        self._z = math.sqrt(-2 * math.log(_wide_uniform(a, b))) * math.cos(2 * math.pi * (_wide_uniform(c, d) - 0.5))
        a, b, _, _ = _philox(bits, 2)
        self._log_uniform = math.log(_wide_uniform(a, b))
        self._is_moved = int(self._frozen_at) < 0 and math.isfinite(_mean(losses))
        if not self._is_moved:
            self._sums[:5] = 0.0
            return
        rows = []
        columns = zip(self._counts, s.lr, s.betas, s.eps, s.sigma, s.precision, strict=True)
        for k, lr, (beta1, beta2), eps, sigma, precision in columns:
            root, whiten = math.sqrt(1 - beta2 ** (k + 1)), 1 / sigma if sigma > 0 else 0.0
            rate = lr * root / (1 - beta1 ** (k + 1))
            rows.append((rate, eps * root, 1 - beta1, beta2, 1 - beta2, sigma, whiten, precision))
        self._coefficients.copy_(torch.tensor(rows, dtype=torch.float64))
        threads = max(1, min(torch.get_num_threads(), self._num_weights // _THREADS))
        self._propose(
            self._places.data_ptr(), gradients.addresses.data_ptr(), self._sizes.data_ptr(), self._bases.data_ptr(),
            self._chunks.data_ptr(), self._num_chunks, _CHUNK, self.num_tensors, self._coefficients.data_ptr(), bits,
            s.sigma_along * self._z - 1, 1 / scale, self._sums.data_ptr(), threads,
        )  # fmt: skip

    def products(self, gradients: _Table, scale: float) -> Tensor:
        """theta . grad V of each tensor, at the present weights for fixed data, else at the last theta."""
        assert self._settings is not None
        params = self._params if self.fixed else self.backup
        values = []
        for p, g, precision in zip(params, gradients.tensors, self._settings.precision, strict=True):
            flat = p.reshape(-1)
            values.append(torch.dot(flat, g.reshape(-1)) + torch.dot(flat, flat) * (precision / scale))
        return torch.stack(values).double()

    def decide(
        self,
        here: Tensor,
        there: Tensor | None,
        log_prior: tuple[Tensor, Tensor] | None,
        *,
        scale: float,
        noise_scale: float,
        gradients: _Table,
        fresh: _Table | None = None,
        rows: Tensor,
        slot: Tensor,
        flags: Tensor,
    ) -> None:
        """Test the proposal and settle it, as `onepass.OnePass.decide`; see there."""
        s = self._settings
        assert s is not None
        square, ratio, cross, level, change = self._sums[:5].tolist()
        prior_here, prior_change = -0.5 * level, -0.5 * change
        if log_prior is not None:
            prior_here = float(log_prior[0])
            prior_change = float(log_prior[1]) - prior_here
        loss = _mean(here)
        was_free = int(self._frozen_at) < 0
        healthy = math.isfinite(square + loss + prior_here) and was_free
        proposed_loss = log_q = log_ratio = noise = math.nan
        if there is not None:
            proposed_loss = _mean(there)
            # the losses are subtracted one by one: see `target.potential_difference`
            difference = None if here.numel() == 1 else there.double() - here.double()
            mean = proposed_loss - loss if difference is None else float(difference.mean())
            log_q = (cross - (1 - s.sigma_along * self._z) * ratio) * (2 / (1 + s.sigma_along**2 * ratio))
            log_ratio = log_q - (scale * mean - prior_change)
            finite = math.isfinite(log_ratio)
            accepted = healthy and finite and self._log_uniform < log_ratio
            rate = math.exp(min(log_ratio, 0.0)) if healthy and finite else 0.0
            noise = 0.0 if noise_scale == 0 else noise_scale
            if difference is not None and noise_scale > 0:
                noise = float(difference.std()) * noise_scale
            if self.fixed and accepted:
                here.copy_(there)
                if log_prior is not None:
                    log_prior[0].copy_(log_prior[1])
        else:
            finite = math.isfinite(prior_change)
            accepted = finite and healthy
            rate = float(accepted)
        if was_free and not healthy:
            self._frozen_at.fill_(self.clock)
        if self._is_moved and not accepted:
            self.put_back()
        if accepted and self.fixed and fresh is not None:
            torch._foreach_copy_(gradients.tensors, fresh.tensors)
        self.clock += 1
        self._counts = [k + 1 for k in self._counts]
        self._sum_rates += rate
        known = 0.0 if there is None else float(here.numel()) if here.dim() > 1 else math.nan
        reach = math.nan if 0.0 in s.sigma else math.sqrt(ratio) if ratio >= 0 else math.nan
        report = [loss, proposed_loss, log_q, log_ratio, rate, float(accepted), float(finite)]  # in the order of `Info`
        rows[0].copy_(torch.tensor([*report, known, scale * loss - prior_here, reach, noise], dtype=torch.float64))
        flags.copy_(torch.tensor([[accepted], [finite]], dtype=torch.uint8))


def _mean(losses: Tensor) -> float:
    return float(losses) if losses.numel() == 1 else float(losses.double().mean())


def _philox(key: int, stream: int) -> tuple[int, int, int, int]:
    """The four numbers of counter (0, 0, stream, 0): see `philox`."""
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    c0, c1, c2, c3 = 0, 0, stream, 0
    for _ in range(10):
        p, q = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (q >> 32) ^ c1 ^ k0, q & 0xFFFFFFFF, (p >> 32) ^ c3 ^ k1, p & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _wide_uniform(low: int, high: int) -> float:
    return ((high * 2.0**32 + low) / 4096.0 + 0.5) * 2.0**-52
