"""Breaks the code on purpose, one mistake at a time, and checks that the tests notice: make mutants

Each mutant is a copy of the package with one line changed. It takes some minutes, and is run by hand.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Mutant(NamedTuple):
    """One mistake, and the tests that must notice it."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str


MUTANTS = [
    Mutant(
        "chains that freeze in the last window stay frozen",
        "samplers/adaptation.py",
        "    of._length = max(_RESCUE, _LAST_WINDOW // of._num_chains)\n    of._start_window()\n    return True",
        "    return False",
        "tests/test_persistence.py",
    ),
    Mutant(
        "the velocity is kept as long as it costs most",
        "samplers/persistence.py",
        "best = int(costs.argmin())",
        "best = int(costs.argmax())",
        "tests/test_persistence.py",
    ),
    Mutant(
        "a chain in a bad place decides on the friction of all",
        "samplers/persistence.py",
        "each[i :: len(_FACTORS)].median(0).values",
        "each[i :: len(_FACTORS)].max(0).values",
        "tests/test_persistence.py",
    ),
    Mutant(
        "steps are jittered, and the velocity is kept as if they were not",
        "kernels/hamiltonian.py",
        "each = torch.where(size > 0, torch.exp(-friction * size), 1.0)",
        "each = torch.where(size > 0, torch.exp(-2 * friction * size), 1.0)",
        "tests/test_persistence.py",
    ),
    Mutant(
        "a stopped member goes on improving",
        "runs/training.py",
        "is_better = is_active & (found < best",
        "is_better = (found < best",
        "tests/test_members.py",
    ),
    Mutant(
        "members keep their last weights, not their best",
        "runs/training.py",
        "(found < best if held_out",
        "(found < math.inf if held_out",
        "tests/test_members.py",
    ),
    Mutant(
        "a resumed run trains its members again",
        "runs/session.py",
        "isinstance(plan.initial, TrainMembers) or self._is_resumed",
        "isinstance(plan.initial, TrainMembers) or False",
        "tests/test_members.py",
    ),
    Mutant(
        "the log determinant of a constraint is left out",
        "target/constraints.py",
        "return value if log_det is None else value + log_det",
        "return value",
        "tests/test_constraints.py",
    ),
    Mutant(
        "a covariance has the log determinant of its factor's columns in the wrong order",
        "target/constraints.py",
        "torch.arange(d + 1, 1, -1,",
        "torch.arange(2, d + 2, 1,",
        "tests/test_constraints.py",
    ),
    Mutant(
        "chains that influence each other pass",
        "samplers/functional.py",
        "x[1::2] = x[0]",
        "x[1::2] = x[1::2].flip(0)",
        "tests/test_draws.py",
    ),
    Mutant(
        "a funnel is looked for on the scale of the acceptance rate",
        "samplers/draws_verdict.py",
        "_stiffness(worst.rate) < bar * _stiffness(mean)",
        "worst.rate > mean / bar",
        "tests/test_draws.py",
    ),
    Mutant(
        "the change of U is taken between draws, not steps",
        "samplers/functional.py",
        "        if step > burn_in:\n            jumps.add",
        "        if step > burn_in and rest == 0:\n            jumps.add",
        "tests/test_draws.py",
    ),
    Mutant(
        "the volume of a microcanonical turn has the wrong dimension",
        "kernels/microcanonical.py",
        "gained = (d - 1) * (delta",
        "gained = d * (delta",
        "tests/test_microcanonical.py",
    ),
    Mutant(
        "the gradient of a rejected proposal kept",
        "kernels/kernel.py",
        "is None else select(info.is_accepted, new.grad, here.grad)",
        "is None else new.grad",
        "tests/test_joint.py",
    ),
    Mutant(
        "momentum refreshed with too little noise",
        "kernels/hamiltonian.py",
        "return [(_KEPT, math.sqrt(1 - _KEPT**2))] * num_leaves",
        "return [(_KEPT, math.sqrt(1 - _KEPT))] * num_leaves",
        "tests/test_joint.py",
    ),
    Mutant(
        "half of the energy of a microcanonical step counted twice, half not at all",
        "kernels/microcanonical.py",
        "return -(gained + more), after",
        "return -2 * more, after",
        "tests/test_sbc.py",
    ),
    Mutant(
        "random numbers pass under fixed data",
        "samplers/closure.py",
        "exactly=self._layers.seen.draws_numbers",
        "exactly=False",
        "tests/test_resolution.py",
    ),
    Mutant(
        "a coarse U is called exact",
        "samplers/chains.py",
        "fixed_data=self.fixed_data) + coarse + self._complaints()",
        "fixed_data=self.fixed_data) + self._complaints()",
        "tests/test_resolution.py",
    ),
    Mutant(
        "a summed loss passes for the mean",
        "samplers/closure.py",
        'is_sum = _is_summed(node, "sum")',
        "is_sum = False",
        "tests/test_closure.py",
    ),
    Mutant(
        "padding rows of embeddings are sampled",
        "samplers/packing.py",
        "    return {key: rows for key, rows in common.items() if rows}",
        "    return {}",
        "tests/test_packing.py",
    ),
    Mutant(
        "a process group is not refused",
        "samplers/processes.py",
        "if (size := torch.distributed.get_world_size()) > 1:",
        "if (size := torch.distributed.get_world_size()) > 2:",
        "tests/test_processes.py",
    ),
    Mutant(
        "sign of the log ratio (test)",
        "acceptance/protocol.py",
        "return self.log_q_ratio() - self.potential.compare(self.here, self.there())",
        "return self.log_q_ratio() + self.potential.compare(self.here, self.there())",
        "tests/test_kernels.py tests/test_acceptance.py",
    ),
    Mutant(
        "sign of the proposal's log ratio (Algorithm 1)",
        "kernels/proposal.py",
        "(2 / (1 + self.sigma_along**2 * a))",
        "(-2 / (1 + self.sigma_along**2 * a))",
        "tests/test_proposal.py",
    ),
    Mutant(
        "sign of the proposal's log ratio (MALA)",
        "kernels/proposal.py",
        "return isotropic + rank_one + determinant",
        "return -isotropic + rank_one + determinant",
        "tests/test_kernels.py",
    ),
    Mutant(
        "scalar noise turned elementwise",
        "kernels/proposal.py",
        "moved.addcmul_(u, per_chain(coefficient, u))",
        "moved.addcmul_(u, sigma_along * torch.randn(u.shape, generator=generator, device=u.device, dtype=u.dtype) - 1)",
        "tests/test_proposal.py tests/test_kernels.py",
    ),
    Mutant(
        "determinant of directional MALA",
        "kernels/proposal.py",
        "return isotropic + rank_one + determinant",
        "return isotropic + rank_one",
        "tests/test_kernels.py",
    ),
    Mutant(
        "a rejected state is not repeated",
        "kernels/kernel.py",
        "params = select(info.is_accepted, move.proposed, leaves)",
        "params = move.proposed",
        "tests/test_kernels.py",
    ),
    Mutant(
        "momenta restored on rejection",
        "kernels/kernel.py",
        "    cache = here if potential.fixed else None\n",
        "    cache = here if potential.fixed else None\n    memory = keep(info.is_accepted, memory, state.memory)\n",
        "tests/test_kernels.py",
    ),
    Mutant(
        "loss scale",
        "target/potential.py",
        "return scale * mean - (proposed.log_prior - current.log_prior)",
        "return mean - (proposed.log_prior - current.log_prior)",
        "tests/test_optimizer.py tests/test_target.py",
    ),
    Mutant(
        "prior's gradient left out",
        "samplers/closure.py",
        "grads = [g.sub(q, alpha=1 / self.scale) for g, q in zip(grads, prior_grad, strict=True)]",
        "pass",
        "tests/test_closure.py",
    ),
    Mutant(
        "the correction C left out (Theorem 1)",
        "kernels/exact_adam.py",
        "self.proposal.log_q_ratio(move) + self._log_correction(moments, here, there())",
        "self.proposal.log_q_ratio(move)",
        "tests/test_kernels.py",
    ),
    Mutant(
        "the floor under the second moment ignored",
        "kernels/exact_adam.py",
        "(widen(m2).abs() + self.floor).sqrt()",
        "(widen(m2).abs() + 1e-12).sqrt()",
        "tests/test_kernels.py",
    ),
    Mutant(
        "the velocity not flipped on rejection",
        "kernels/hamiltonian.py",
        "flipped = tuple(-p for p in before)",
        "flipped = before",
        "tests/test_kernels.py",
    ),
    Mutant(
        "no log rho in the corrected loss",
        "kernels/corrected.py",
        "1.0, self.zeta * math.log(self.rho)",
        "1.0, 0.0",
        "tests/test_corrected.py",
    ),
    Mutant(
        "lambda of the corrected loss not compensated",
        "kernels/corrected.py",
        "factor, correction = 1 / self.weight if self.compensate else 1.0,",
        "factor, correction = 1.0,",
        "tests/test_corrected.py",
    ),
    Mutant(
        "the old loss on the new batch",
        "kernels/corrected.py",
        "here = state.here or before.evaluate(params)",
        "here = pair.evaluate(params)",
        "tests/test_corrected.py",
    ),
    Mutant(
        "the new batch kept on rejection",
        "kernels/corrected.py",
        "kept = torch.where(info.is_accepted[:, None], new, old)",
        "kept = new",
        "tests/test_corrected.py",
    ),
    Mutant(
        "the reverse gradient is the forward one",
        "kernels/langevin.py",
        "self._update(there(), potential.scale)",
        "move.update",
        "tests/test_corrected.py",
    ),
    Mutant(
        "the persistent uniform not carried over by an accepted move",
        "kernels/hamiltonian.py",
        "decides * torch.exp(-log_ratio.nan_to_num(nan=0.0))",
        "decides",
        "tests/test_kernels.py",
    ),
    Mutant(
        "a trajectory that is followed is judged by its last move alone",
        "kernels/hamiltonian.py",
        "y = reached.log_ratio + gained",
        "y = gained",
        "tests/test_kernels.py",
    ),
    Mutant(
        "what is accepted later keeps the height of the first move",
        "kernels/hamiltonian.py",
        "_raised(decides, info.is_accepted, log_ratio)), info",
        "_raised(decides, info.is_accepted, info.log_ratio)), info",
        "tests/test_kernels.py",
    ),
    Mutant(
        "chains whose move was accepted move on with those that were refused",
        "kernels/hamiltonian.py",
        "is_found = is_moving & (height < y)",
        "is_found = height < y",
        "tests/test_kernels.py",
    ),
    Mutant(
        "settled chains are evaluated where others are still trying",
        "kernels/hamiltonian.py",
        "proposed = select(is_moving, move.proposed, params)",
        "proposed = move.proposed",
        "tests/test_stacked.py",
    ),
    Mutant(
        "chains that are evaluated without the others get their gradients",
        "samplers/stacked.py",
        "grad = tuple(torch.zeros_like(x).index_copy(0, rows, g)",
        "grad = tuple(torch.zeros_like(x).index_copy(0, torch.arange(len(rows)), g)",
        "tests/test_stacked.py",
    ),
    Mutant(
        "another dropout mask on the other side",
        "samplers/layers.py",
        "    set_random_state(states, device)\n",
        "",
        "tests/test_layers.py",
    ),
    Mutant(
        "buffers not put back on rejection",
        "samplers/layers.py",
        "            if not bool(is_accepted):\n                self.abort()\n",
        "            pass\n",
        "tests/test_layers.py",
    ),
    Mutant(
        "draws that hold the variance divided by n - 1",
        "samplers/layers.py",
        "var = var * ((n - calls) / n) if n > calls else torch.zeros_like(var)",
        "pass",
        "tests/test_layers.py",
    ),
    Mutant(
        "the statistics of a draw left in the chain",
        "samplers/layers.py",
        "                    self.abort()\n",
        "                    pass\n",
        "tests/test_layers.py",
    ),
    Mutant(
        "stacked draws that hold lagging running statistics",
        "samplers/stacked.py",
        "            view(fresh, *key).copy_(value)\n",
        "            pass\n",
        "tests/test_layers.py",
    ),
    Mutant(
        "moments in place are those of another gradient",
        "kernels/direction.py",
        "torch.lerp(m1, g, 1 - beta1, out=None if into is None else m1)",
        "torch.lerp(m1, g, 1 - beta1 if into is None else 1 - beta2, out=None if into is None else m1)",
        "tests/test_workspace.py",
    ),
    Mutant(
        "the order of the data not restored on resume",
        "runs/checkpoint.py",
        '        loop.session.data.load_state_dict(state["data"])\n',
        "        pass\n",
        "tests/test_resume.py",
    ),
    Mutant(
        "dropout's random numbers not restored on resume",
        "runs/checkpoint.py",
        '    torch.set_rng_state(state["random"])\n',
        "",
        "tests/test_resume.py",
    ),
    Mutant(
        "the scheduler not restored on resume",
        "runs/checkpoint.py",
        '        loop.scheduler.load_state_dict(state["scheduler"])\n',
        "        pass\n",
        "tests/test_resume.py",
    ),
    Mutant(
        "draws after the checkpoint kept on resume",
        "posterior/store/folder.py",
        '            self.rewind(chain, state["num_draws"])\n',
        "            pass\n",
        "tests/test_resume.py tests/test_store.py",
    ),
    Mutant(
        "a callback's random numbers taken from the chain",
        "runs/callbacks.py",
        "        self._others = states\n",
        "        for generator, state in zip(self._global, states, strict=True):\n            generator.set_state(state)\n",
        "tests/test_callbacks.py",
    ),
    Mutant(
        "draws handed over only after a last checkpoint",
        "runs/session.py",
        "        error.result = Posterior(store, self.model)  # type: ignore[attr-defined]  # first",
        "        store.save(loop.key, loop.state())\n        error.result = Posterior(store, self.model)  # first",
        "tests/test_run.py",
    ),
    Mutant(
        "a terminal that says twice that it closes does not wait",
        "runs/interrupts.py",
        "        self.signal = self.signal or signal.Signals(number)\n",
        "        if self.signal:\n            raise self.exception()\n        self.signal = signal.Signals(number)\n",
        "tests/test_interrupts.py",
    ),
    Mutant(
        "the index not synced before the checkpoint",
        "posterior/store/atomic.py",
        "                os.fsync(index.fileno())  # before the checkpoint that counts on it\n",
        "",
        "tests/test_damage.py",
    ),
    Mutant(
        "the checksum of a checkpoint not compared",
        "posterior/store/encoding.py",
        "    if written != computed:\n",
        "    if False:\n",
        "tests/test_damage.py tests/test_checking.py",
    ),
    Mutant(
        "a link followed in the place of a file",
        "posterior/store/atomic.py",
        'for _flag in ("O_NOFOLLOW", "O_NONBLOCK",',
        'for _flag in ("O_NONBLOCK",',
        "tests/test_hostile.py",
    ),
    Mutant(
        "prediction in training mode",
        "posterior/predictive.py",
        "            self.model.eval()\n",
        "",
        "tests/test_predictive.py",
    ),
    Mutant(
        "entropy of one draw in place of the mean's",
        "posterior/uncertainty.py",
        "_entropy(predictions.double().mean(0), is_binary)",
        "_entropy(predictions.double()[0], is_binary)",
        "tests/test_uncertainty.py",
    ),
    Mutant(
        "examples served twice in an epoch",
        "target/data.py",
        "rows = self._order[self._position * self.batch_size : (self._position + 1) * self.batch_size]",
        "rows = self._order[: self.batch_size]",
        "tests/test_data.py",
    ),
    Mutant(
        "buffers of all chains move when one accepts",
        "samplers/vmapped.py",
        "torch.where(mask[owner], y, n)",
        "torch.where(mask.any(), y, n)",
        "tests/test_stacked.py",
    ),
    Mutant(
        "one temperature for all chains",
        "samplers/stacked.py",
        "self.scale = _joined([target.scale for target in targets], prototype.device)",
        "self.scale = targets[0].scale",
        "tests/test_stacked.py",
    ),
    Mutant(
        "the prior's gradient in the units of the first chain",
        "samplers/stacked.py",
        "by_chain(1 / self.scale, q)",
        "by_chain(1 / self._stack.owner.targets[0].scale, q)",
        "tests/test_stacked.py",
    ),
    Mutant(
        "chains share their noise",
        "target/randomness.py",
        "            fill(row, generator=generator)\n",
        "            fill(row, generator=self._generators[0])\n",
        "tests/test_stacked.py tests/test_randomness.py",
    ),
    Mutant(
        "draws of a stack after its checkpoint kept on resume",
        "posterior/store/folder.py",
        "for chain in chains:\n            self.rewind",
        "for chain in list(chains)[:1]:\n            self.rewind",
        "tests/test_resume.py",
    ),
    Mutant(
        "first layer of an edge without its difference",
        "jets/particlenet.py",
        "F.linear(x, own - other)",
        "F.linear(x, own)",
        "tests/jets/test_particlenet.py",
    ),
    Mutant(
        "missing neighbours taken for the first particle",
        "jets/particlenet.py",
        "torch.where(neighbours == NOBODY, nobody, rows)",
        "torch.where(neighbours == NOBODY, 0, rows)",
        "tests/jets/test_particlenet.py",
    ),
    Mutant(
        "towers of later events at another phi",
        "jets/detector.py",
        "seen.event * self._towers_of_event +",
        "seen.event * (self._towers_of_event + 5) +",
        "tests/jets/test_detector.py",
    ),
    Mutant(
        "jets that do not hold their heavy particle",
        "jets/events.py",
        "chosen &= _holds_heavy(record, process, event, jets, settings.radius)",
        "pass",
        "tests/jets/test_generate.py",
    ),
    Mutant(
        "the mean noise for every draw of the mixture",
        "posterior/calibration.py",
        "means, variances = prediction.raw, prediction.raw_variances",
        "means, variances = prediction.raw, prediction.aleatoric.expand_as(prediction.raw)",
        "tests/test_calibration.py",
    ),
    Mutant(
        "a probe that leaves its random numbers behind",
        "posterior/predictive.py",
        'with torch.random.fork_rng([device] if device.type == "cuda" else []), self._evaluator.evaluating():',
        "with self._evaluator.evaluating():",
        "tests/test_predictive.py",
    ),
    Mutant(
        "chains from one start called sound",
        "posterior/diagnosis.py",
        "return starts is None or len({starts[c] for c in chains}) == 1",
        "return False",
        "tests/test_summary.py",
    ),
    Mutant(
        "DeLong's error without the background's part",
        "posterior/calibration.py",
        "variance = _variance_of_mean(of_ones) + _variance_of_mean(of_zeros)",
        "variance = _variance_of_mean(of_ones)",
        "tests/jets/test_metrics.py",
    ),
    Mutant(
        "a training that forgets its random numbers",
        "jets/tagger.py",
        'torch.set_rng_state(self._random["cpu"])',
        "torch.manual_seed(0)",
        "tests/jets/test_tagger.py",
    ),
    Mutant(
        "a pickled attribute that may hold anything",
        "jets/hdf5.py",
        "elif opcode.name not in _STRUCTURE | _MEMO:",
        "elif False:",
        "tests/jets/test_hdf5.py",
    ),
    Mutant(
        "a link that leads out of a file of jets",
        "jets/hdf5.py",
        "if not isinstance(link, h5py.HardLink):",
        "if False:",
        "tests/jets/test_hdf5.py",
    ),
    Mutant(
        "an archive that is read without a look at its size",
        "posterior/store/archives.py",
        "if free is not None and size > free:",
        "if False:",
        "tests/test_archives.py",
    ),
    Mutant(
        "a run whose code is imported without trust",
        "cli/commands.py",
        "if not trust_code and (names :=",
        "if False and (names :=",
        "tests/test_cli.py",
    ),
    Mutant(
        "the drift of one pass in the wrong direction",
        "backends/triton_adam.py",
        "shift = along * u",
        "shift = -along * u",
        "tests/test_one_pass.py",
    ),
    Mutant(
        "the released noise without its part in the ratio, in one pass",
        "backends/triton_adam.py",
        "cross += tl.sum(wide_u * wide_u * zeta.to(tl.float64)) * sigma_along * whiten * whiten",
        "cross += 0.0 * tl.sum(wide_u * wide_u * zeta.to(tl.float64))",
        "tests/test_one_pass.py",
    ),
    Mutant(
        "the influence of the loss is lost for tests on other examples",
        "samplers/running_sums.py",
        "change = torch.where(change.isnan(), infos.log_q_ratio - infos.log_ratio, change)",
        "change = torch.where(change.isnan(), 0.0, change)",
        "tests/test_health.py",
    ),
    Mutant(
        "divergence waits for effective draws",
        "samplers/health.py",
        "if run.divergence is None or is_held:",
        "if run.divergence is None or run.draws < _ENOUGH_DRAWS:",
        "tests/test_health_verdicts.py",
    ),
    Mutant(
        "a runaway downhill passes",
        "samplers/health.py",
        "for sign in (1, -1):",
        "for sign in (1,):",
        "tests/test_health_verdicts.py",
    ),
    Mutant(
        "a temperature is taken from gradients in reduced precision",
        "samplers/chains.py",
        "of.network.names if layers.reduced else of.network.scaled_away()",
        "of.network.scaled_away()",
        "tests/test_health_verdicts.py",
    ),
    Mutant(
        "effective draws of a trend taken for independent stretches",
        "samplers/health.py",
        "return min(float(ess_bulk(trace[None])), len(trace)) * worth",
        "return len(trace) * worth",
        "tests/test_health.py",
    ),
    Mutant(
        "a burn-in that failed is forgotten",
        "samplers/chains.py",
        '"burn_in": None if of.adaptation is None else of.adaptation.complaint(),',
        '"burn_in": None,',
        "tests/test_health_verdicts.py",
    ),
    Mutant(
        "U taken for flat whatever it does",
        "samplers/adaptation.py",
        "return max(abs(now - before), abs(drift), resolution) < 0.5 * min(fluctuation, self._natural)",
        "return True",
        "tests/test_adaptation.py",
    ),
    Mutant(
        "noise of the batch taken for the fluctuation of U",
        "samplers/adaptation.py",
        "0.5 * min(fluctuation, self._natural)",
        "0.5 * fluctuation",
        "tests/test_adaptation.py",
    ),
    Mutant(
        "a velocity of the approach in another dtype than the weights, drawn anew at each step",
        "samplers/adaptation.py",
        "(1 / q).to(widen(x).dtype)",
        "(1 / q)",
        "tests/test_record.py",
    ),
    Mutant(
        "wall time in a checkpoint",
        "samplers/budget.py",
        "return 0.0 if self.limit is None else self.seconds",
        "return self.seconds",
        "tests/test_resume.py",
    ),
    Mutant(
        "a window that outlasts the limit in seconds",
        "samplers/adaptation.py",
        "self._length = self.budget.steps(self._step, self._length)",
        "pass",
        "tests/test_record.py",
    ),
    Mutant(
        "an acceptance far from its target that nobody hears of",
        "samplers/aim.py",
        "if mean + _ERRORS * error < low:",
        "if mean + _ERRORS * error < 0:",
        "tests/test_record.py",
    ),
    Mutant(
        "noise of a batch as if drawn with replacement",
        "acceptance/protocol.py",
        "1 - size * self.potential.inverse_temperature / self.potential.scale",
        "1.0",
        "tests/test_acceptance.py",
    ),
    Mutant(
        "R-hat by chance of draws taken for independent",
        "samplers/diagnostics.py",
        "(scatter if num_draws is None else 2 / num_draws)",
        "scatter",
        "tests/test_diagnostics.py",
    ),
    Mutant(
        "a trial that draws in its burn-in",
        "../../replication/trials.py",
        '// num_draws, "burn_in": burn_in}',
        '// num_draws, "burn_in": 0}',
        "tests/replication/test_trials.py",
    ),
    Mutant(
        "a trial whose loss is always the mean of the batch",
        "../../replication/trials.py",
        "loss=trial.scale,",
        'loss="mean",',
        "tests/replication/test_trials.py",
    ),
    Mutant(
        "kappa without the noise along the step",
        "../../replication/trials.py",
        "return r / (1 + (along(trial.sigma_delta) * r) ** 2).sqrt()",
        "return r",
        "tests/replication/test_trials.py",
    ),
    Mutant(
        "a trial that continues a run of another device",
        "../../replication/work.py",
        'made_by = {"device": device_name(self.device), ',
        "made_by = {",
        "tests/replication/test_trials.py",
    ),
    Mutant(
        "a trial whose checkpoints forget their own step",
        "../../replication/trials.py",
        "self._note(self._event)  # a checkpoint",
        "pass  # a checkpoint",
        "tests/replication/test_trials.py",
    ),
    Mutant(
        "callbacks that start afresh when a run is resumed",
        "runs/callbacks.py",
        "callback.load_state_dict(chain, state)",
        "pass",
        "tests/test_callbacks.py",
    ),
    Mutant(
        "long runs with the burn-in of short ones",
        "../../replication/settings.py",
        '"burn_in": steps // 2}',
        '"burn_in": self.burn_in}',
        "tests/replication/test_sections.py",
    ),
    Mutant(
        "chains from trained weights that start anywhere",
        "../../replication/fig2b.py",
        "sigma_delta=0.0, start=preset.burn_in)\n        for name",
        "sigma_delta=0.0)\n        for name",
        "tests/replication/test_sections.py",
    ),
    Mutant(
        "verdicts that take each number for one of three seeds",
        "../../replication/sections.py",
        'return {name_of(row): row["seeds"] for row in rows}',
        "return {name_of(row): 3 for row in rows}",
        "tests/replication/test_sections.py",
    ),
    Mutant(
        "reliability of seeds averaged without their jets",
        "../../replication/rows.py",
        "weighted = [count * (p[name][number] or 0.0)",
        "weighted = [sum(counts) / len(parts) * (p[name][number] or 0.0)",
        "tests/replication/test_rows.py",
    ),
    Mutant(
        "a headline whose exact sampler has no proposal ratio",
        "kernels/proposal.py",
        "return isotropic + rank_one + determinant",
        "return 0 * (isotropic + rank_one + determinant)",
        "tests/replication/test_headline.py",
    ),
    Mutant(
        "a refused proposal left in place by one pass",
        "backends/triton_passes.py",
        "    last = tl.where(accepted, 0, num_chunks)\n",
        "    last = tl.where(accepted, 0, 0 * num_chunks)\n",
        "tests/test_one_pass.py",
    ),
    Mutant(
        "the velocity is not turned by a refusal in one pass",
        "backends/triton_underdamped.py",
        "tl.where(accepted, after, -p)",
        "tl.where(accepted, after, p)",
        "tests/test_one_pass.py",
    ),
    Mutant(
        "one stream of counters for all chains",
        "backends/philox.py",
        "    key = tl.load(keys + chain)\n",
        "    key = tl.load(keys + chain * 0)\n",
        "tests/test_randomness.py",
    ),
    Mutant(
        "no factor for a finite population",
        "acceptance/subsample.py",
        "math.sqrt((1 - self.size / self.num_data) / self.size)",
        "math.sqrt(1 / self.size)",
        "tests/test_subsample.py",
    ),
    Mutant(
        "a log uniform number in Barker's test",
        "acceptance/barker.py",
        "is_accepted = (value > 0)",
        "is_accepted = (value > u.log())",
        "tests/test_subsample.py",
    ),
    Mutant(
        "Barker's noise not filled up to 1",
        "acceptance/barker.py",
        "y + (1 - s.square()).clamp_min(0).sqrt() * z + correction(u)",
        "y + correction(u)",
        "tests/test_subsample.py",
    ),
    Mutant(
        "the t-test stops too early",
        "acceptance/growing.py",
        "gap > student_quantile(self.eps, sample.size - 1) * sample.noise",
        "gap > student_quantile(self.eps, sample.size - 1) * sample.noise * 0.5",
        "tests/test_subsample.py",
    ),
    Mutant(
        "the range of D in place of that of n D",
        "acceptance/growing.py",
        "return 2 * comparison.num_examples * comparison",
        "return 2 * comparison",
        "tests/test_subsample.py",
    ),
    Mutant(
        "the penalty left out",
        "acceptance/metropolis.py",
        "found._replace(log_ratio=y - s.square() / 2, noise=s)",
        "found._replace(noise=s)",
        "tests/test_subsample.py",
    ),
    Mutant(
        "the sum of the constants left out of the Poisson rate",
        "acceptance/tuna.py",
        "rate = lam * m * table.steps[-1]",
        "rate = lam * m * table.weights.mean() * 10",
        "tests/test_subsample.py tests/test_data_density.py",
    ),
    Mutant(
        "kept with the rates of the way back",
        "acceptance/tuna.py",
        "(extra + (1 + ratio) / 2) / (extra + 1)",
        "(extra + (1 - ratio) / 2) / (extra + 1)",
        "tests/test_subsample.py tests/test_data_density.py",
    ),
    Mutant(
        "a broken bound goes unnoticed",
        "acceptance/tuna.py",
        "is_broken = (is_seen & (difference.abs() > most_allowed + rounding)).any(1)",
        "is_broken = (is_seen & (difference.abs() > 1000)).any(1)",
        "tests/test_subsample.py",
    ),
    Mutant(
        "what the control variate knows not added again",
        "acceptance/protocol.py",
        "return known - self.inverse_temperature() * control.total(self.params, self.proposed)",
        "return known",
        "tests/test_control.py tests/test_data_density.py",
    ),
    Mutant(
        "second-order terms at theta instead of half way",
        "target/control.py",
        "tuple((x - r) + (y - r) for x, y, r in pairs)",
        "tuple(2 * (x - r) for x, y, r in pairs)",
        "tests/test_control.py",
    ),
    Mutant(
        "one order of examples for all chains",
        "target/keyed_random.py",
        "x = key[:, None] + place",
        "x = key[:1, None].expand(len(key), 1) + place",
        "tests/test_keyed_random.py tests/test_subsample.py",
    ),
    Mutant(
        "examples drawn with replacement",
        "target/keyed_random.py",
        "rank = torch.where(is_new & (rank < count), rank, count)",
        "rank = torch.arange(num).expand_as(rank).clamp_max(count)",
        "tests/test_keyed_random.py",
    ),
    Mutant(
        "the gradient of a particle lost on its own edges",
        "jets/edges.py",
        "                left += g\n",
        "                left += g * 0\n",
        "tests/jets/test_edges.py",
    ),
    Mutant(
        "the decision in one launch forgets the prior",
        "backends/triton_passes.py",
        "log_ratio = log_q - (scale * mean - (prior_there - prior_here))",
        "log_ratio = log_q - scale * mean",
        "tests/test_one_pass.py",
    ),
    Mutant(
        "other parameters keep the health of the last ones",
        "samplers/packing.py",
        "self._on_new(not before or same(before, params))",
        "self._on_new(True)",
        "tests/test_subsample_optimizers.py tests/test_sampler.py tests/test_optimizer.py",
    ),
    Mutant(
        "an adaptation with the layout of the fused step",
        "samplers/exact.py",
        "or self._will_adapt:",
        "or self.is_adapting:",
        "tests/test_one_pass.py",
    ),
]


def is_noticed(mutant: Mutant) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("src", "tests", "benchmarks", "docs", "replication"):
            shutil.copytree(ROOT / part, copy / part)
        shutil.copy(ROOT / "pyproject.toml", copy)
        file = copy / "src" / "adammcmc" / mutant.file
        text = file.read_text()
        if text.count(mutant.right) != 1:
            sys.exit(f"{mutant.name}: the line to change was not found once in {mutant.file}")
        file.write_text(text.replace(mutant.right, mutant.wrong))
        environment = {**os.environ, "PYTHONPATH": f"{copy / 'src'}:{copy}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "-m", "not slow", *mutant.tests.split()]
        result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
        if not re.search(r"\d+ (passed|failed)", result.stdout):
            sys.exit(f"{mutant.name}: the tests did not run\n{result.stdout}{result.stderr}")
        return re.search(r"\d+ failed", result.stdout) is not None


def main() -> None:
    missed = []
    for mutant in MUTANTS:
        noticed = is_noticed(mutant)
        print(f"{'noticed' if noticed else 'MISSED '}  {mutant.name}", flush=True)
        if not noticed:
            missed.append(mutant.name)
    sys.exit(f"{len(missed)} mistakes went unnoticed." if missed else 0)


if __name__ == "__main__":
    main()
