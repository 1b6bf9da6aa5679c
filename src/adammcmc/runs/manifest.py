"""What `run.json` stores of a run, and the checks that a resumed run is the same."""

from __future__ import annotations

import inspect
import json
import math
import platform
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import safetensors
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from adammcmc.errors import StoreMismatch, warn
from adammcmc.posterior.posterior import check_model, describe_tensors
from adammcmc.posterior.store.encoding import plain_json
from adammcmc.runs.factory import Factory, finds_settings, innermost
from adammcmc.runs.members import TrainMembers
from adammcmc.samplers.adaptation import BurnIn
from adammcmc.samplers.sampler import Sampler
from adammcmc.target.priors import Prior

if TYPE_CHECKING:
    from adammcmc.runs.loop import Loop
    from adammcmc.runs.session import Session

__all__ = ["check_same_run", "new_manifest", "note_environment"]


def new_manifest(session: Session, loop: Loop) -> dict[str, Any]:
    """The manifest of a run whose first chain, or all of whose chains, are in `loop` at their first step."""
    plan, data, model, sampler = session.plan, session.data, session.model, session.prototype
    starts = session.initial or [model.state_dict()] * plan.num_chains
    training, members = plan.initial if isinstance(plan.initial, TrainMembers) else None, session.members
    first = session.first_batch
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "target": session.describe(loop.chains),
        "target_at_first": session.describe(loop.chains, is_full=False),
        "chains": [_chain_options(sampler, session.factory, session.options(chain)) for chain in range(plan.num_chains)],
        "starts": [_checksum(state) for state in starts],
        **({} if members is None else {"members": members.record()}),
        "keep": plan.keep,
        "dtype": None if plan.dtype is None else str(plan.dtype).removeprefix("torch."),
        "has_targets": not session.loss.takes_model(first),
        "num_parts": len(first) if isinstance(first, tuple | list) else 1,
        "likelihood": session.likelihood._asdict(),
        "configuration": {
            "sampler": type(sampler).__name__,
            "loss": session.loss.description,
            "prior": [str(sampler.target.prior), plain_json(getattr(sampler.target.prior, "scale", None))],
            "scheduler": None if loop.scheduler is None else type(loop.scheduler).__name__,
            "modes (train or eval)": _modes(model),
            "num_draws": plan.num_draws,
            "gap": plan.gap,
            "burn_in": plain_json(plan.burn_in),
            "num_chains": plan.num_chains,
            "seed": plan.seed,
            "batch_size": data.batch_size,
            "settings": _settings_of(sampler),
            **({} if session.chunk_size is None else {"chunk_size": session.chunk_size}),
            **({"stacked": True} if loop.key is None else {}),
            **({"scan": session.scan} if session.scan else {}),
            **({"warm_up": [_tuned_in_words(plan.tuned(chain)) for chain in range(plan.num_chains)]} if plan.records else {}),
            **({} if training is None else {"members": training.settings()}),
        },
        "prior": _describe_prior(sampler.target.prior, sampler),
        "data": {"num_data": data.num_data, "fingerprint": data.fingerprint(), "all_rows": data.all_rows()},
        "why_not_resumable": data.why_not_resumable,
        "model": {
            "class": type(model).__name__,
            "num_params": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "tensors": describe_tensors(model),
        },
        "versions": _versions(),
        "machine": _machine(session.device),
        **({} if plan.config is None else {"config": json.loads(json.dumps(dict(plan.config), allow_nan=False))}),
    }


def check_same_run(before: dict[str, Any], now: dict[str, Any], session: Session) -> None:
    """Refuse to resume a run with anything changed but the number of draws, by the manifests of the run and this call."""
    what = f"the run in '{session.plan.path}'"
    check_model(before["model"]["tensors"], session.model, what)
    if session.data.why_not_resumable is not None:
        raise StoreMismatch(f"{what} cannot be resumed: {session.data.why_not_resumable}.")
    old, new = (
        {"stacked": None, "scan": None, "warm_up": None, "members": None, **x["configuration"]}
        | {key: x[key] for key in ("keep", "dtype", "likelihood")}
        | {"num_data": x["data"]["num_data"], "target": x["target_at_first"]}
        for x in (before, now)
    )
    num_draws = old.pop("num_draws")
    if new.pop("num_draws") < num_draws:
        raise StoreMismatch(
            f"{what} has num_draws = {num_draws}, this call has {session.plan.num_draws}: the number may grow, not shrink."
        )
    for key, value in new.items():
        if old.get(key) != value:
            raise StoreMismatch(f"{what} has {key} = {old.get(key)}, this call has {value}. To resume, {_ALL_THE_SAME}")
    if (difference := _prior_difference(before.get("prior"), now["prior"])) is not None:
        raise StoreMismatch(f"{what} was made with another prior: {difference}. To resume, {_ALL_THE_SAME}")
    rows, new_rows = before["data"].get("all_rows") or "", now["data"]["all_rows"] or ""
    # checksums of different parts of the data (a Dataset then, tensors now) cannot be compared
    has_other_rows = rows.partition(":")[0] == new_rows.partition(":")[0] and rows != new_rows
    if before["data"]["fingerprint"] != now["data"]["fingerprint"] or has_other_rows:
        raise StoreMismatch(f"{what} was made with other data: their values differ from those of this call.")


_ALL_THE_SAME = "all arguments except `num_draws` must be the same."
_VERSIONS = ("adammcmc", "torch", "numpy")  # on which a random number or a sum may depend


def note_environment(before: dict[str, Any], now: dict[str, Any], folder: Path | None) -> None:
    """Warn if the run continues where rounding may differ, and record it in the stored manifest."""
    last = (before.get("resumed") or [before])[-1]
    old, new = (
        {**{name: x["versions"].get(name) for name in _VERSIONS}, **x.get("machine", now["machine"])} for x in (last, now)
    )
    differences = [f"{name} {old.get(name)} -> {new[name]}" for name in new if old.get(name) != new[name]]
    if differences:
        warn(
            f"the run in '{folder}' continues in another environment ({', '.join(differences)}): the draws from here on "
            "are valid, but not bit for bit those of the original environment."
        )
        before.setdefault("resumed", []).append({key: now[key] for key in ("created", "versions", "machine")})


def _chain_options(sampler: Sampler, factory: Factory, own: dict[str, Any]) -> dict[str, float]:
    """The numerical options of a chain, by name. `sampler` is that of the first chain; `own`: what only this chain has."""
    group = sampler.param_groups[0]
    has_size = "step_size" in inspect.signature(innermost(factory)).parameters
    settings = {("step_size" if has_size and key == "lr" else key): group.get(key) for key in ("lr", "sigma", "sigma_along")}
    if finds_settings(factory):
        settings.pop("step_size", None)  # burn-in finds it
    settings["inverse_temperature"] = sampler.target.inverse_temperature
    settings |= own
    return {key: float(value) for key, value in settings.items() if isinstance(value, int | float)}


def _settings_of(sampler: Sampler) -> dict[str, Any]:
    """The sampler's settings that are numbers or strings."""
    groups = [
        {key: plain_json(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in sampler.param_groups
    ]
    own = {key: value for key, value in vars(sampler).items() if not key.startswith("_")}
    kinds = (bool, int, float, str, tuple, BurnIn)
    return {"groups": groups} | {key: plain_json(value) for key, value in own.items() if isinstance(value, kinds)}


def _tuned_in_words(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of an earlier burn-in: numbers, and checksums of tensors."""
    leaves = {name: [x for x in _pytree.tree_leaves(value) if x is not None] for name, value in settings.items()}
    return {
        name: "; ".join(str(_as_words(x)) for x in parts) if isinstance(parts[0], Tensor) else plain_json(settings[name])
        for name, parts in leaves.items()
    }


_PROBES = (0.01, 0.1, 1.0, 10.0)


def _describe_prior(prior: Prior | None, sampler: Sampler) -> dict[str, Any] | None:
    """Identifies a prior, as JSON: its public attributes, and its log density at a few weights of these shapes.

    The log density also reveals a constant in a closure or a changed line of code.
    """
    if prior is None:
        return None
    shown = {name: _as_words(value) for name, value in vars(prior).items() if not name.startswith("_")}
    params = [p.detach() for group in sampler.param_groups for p in group["params"] if p.requires_grad]
    return {
        "attributes": {name: words for name, words in shown.items() if words is not None},
        "log_density": [_log_density(prior, params, scale) for scale in _PROBES],
    }


def _prior_difference(before: dict[str, Any] | None, now: dict[str, Any] | None) -> str | None:
    """How two descriptions differ, in words; None if they agree, or an older version stored none."""
    if before is None or now is None:
        return None
    old, new = before["attributes"], now["attributes"]
    for name in [*old, *(name for name in new if name not in old)]:
        if old.get(name) != new.get(name):
            return f"its `{name}` was {old.get(name)}, now it is {new.get(name)}"
    for scale, a, b in zip(_PROBES, before["log_density"], now["log_density"], strict=True):
        numbers = isinstance(a, float) and isinstance(b, float)
        if not (math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-9) if numbers else a == b):
            return f"its log density at weights of up to {scale:g} was {a}, now it is {b}"
    return None


def _as_words(value: Any) -> str | None:
    """A number, a string, a tensor or a few of them as text; None for anything else, such as an object."""
    if isinstance(value, bool | int | float | str):
        return str(value)
    if isinstance(value, Tensor):
        content = bytes(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return f"{tuple(value.shape)} {zlib.crc32(content):08x}"
    if isinstance(value, tuple | list) and all(isinstance(item, bool | int | float | str) for item in value):
        text = ", ".join(map(str, value))
        return text if len(text) < 200 else f"{len(value)} values {zlib.crc32(text.encode()):08x}"
    return None


def _log_density(prior: Prior, params: list[Tensor], scale: float) -> float | str:
    """At weights spread evenly over (-scale, scale); a string where it is not finite."""
    points = [torch.linspace(-scale, scale, p.numel(), dtype=p.dtype, device=p.device).reshape(p.shape) for p in params]
    try:
        value = float(prior.log_density(points))
    except Exception as error:  # a prior may raise outside its support
        return type(error).__name__
    return value if math.isfinite(value) else str(value)


def _modes(model: nn.Module) -> str:
    """The mode of the network, and the modules that are in the other one."""
    words = {True: "train", False: "eval"}
    others = [name for name, module in model.named_modules() if module.training != model.training]
    return words[model.training] + (f"; {words[not model.training]}: {', '.join(others)}" if others else "")


def _checksum(state: Mapping[str, Tensor]) -> int:
    """Of all tensors of a state dictionary."""
    checksum = 0
    for name in sorted(state):
        if isinstance(x := state[name], Tensor):
            checksum = zlib.crc32(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


def _machine(device: torch.device) -> dict[str, Any]:
    """What rounding depends on besides versions: the order of summation changes the last digits."""
    settings = {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }
    if device.type != "cuda":
        kind = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else device.type
        return {"device": kind, "threads": torch.get_num_threads(), **settings}
    return {
        "device": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
        "cudnn deterministic": torch.backends.cudnn.deterministic,
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "cudnn tf32": torch.backends.cudnn.allow_tf32,
        **settings,
    }


def _versions() -> dict[str, str]:
    import adammcmc

    return {
        "adammcmc": adammcmc.__version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
