"""Our jets beside real ones of the Top Quark Tagging Reference Dataset: twelve observables, and trees that tell them apart.

    adammcmc jets generate jets --jets 66000 --seed 2026
    python -m benchmarks.jets_real test.h5 jets --max-jets 1000 --output docs/assets/jets_real.png

Prints means, and the AUC (five-fold cross validation) of gradient-boosted trees on the twelve observables of
`adammcmc.jets.observables`, top and QCD in the shares of the real file. 0.5 would be perfect jets.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from torch import Tensor

from adammcmc.jets import Jets, read_jets
from adammcmc.jets.data import KINDS
from adammcmc.jets.figures import COLOURS, LABELS, draw
from adammcmc.jets.metrics import Measured, auc
from adammcmc.jets.observables import OBSERVABLES, observables


def telling_apart(real: Jets, made: Jets, seed: int = 0) -> Measured:
    """How well trees on the twelve observables tell real jets from made ones."""
    tables = [np.stack([observables(jets)[name].numpy() for name in OBSERVABLES], 1) for jets in (real, made)]
    is_real = np.concatenate([np.ones(len(real)), np.zeros(len(made))])
    weight = np.where(is_real == 1, len(made) / len(real), 1.0)
    trees = HistGradientBoostingClassifier(max_iter=150, learning_rate=0.06, max_leaf_nodes=15, random_state=seed)
    folds = StratifiedKFold(5, shuffle=True, random_state=seed)
    scores = cross_val_predict(
        trees, np.concatenate(tables), is_real, cv=folds, method="predict_proba", params={"sample_weight": weight}
    )[:, 1]
    return auc(torch.from_numpy(scores), torch.from_numpy(is_real))


def draw_observables(path: Path, samples: dict[str, dict[str, Tensor]], kinds: dict[str, Tensor]) -> None:
    """Compare twelve observables of two samples, with top and QCD jets separate.

    Args:
        path: of the figure.
        samples: name of a sample -> its observables by name.
        kinds: name of a sample -> kinds of its jets.
    """
    names = list(next(iter(samples.values())))
    with draw(path, 4, 3, size=(13, 8.5)) as panels:
        for axes, name in zip(panels, names, strict=True):
            together = torch.cat([sample[name] for sample in samples.values()])
            edges = torch.linspace(float(together.quantile(0.002)), float(together.quantile(0.998)), 26)
            for (sample, values), style in zip(samples.items(), ("-", "--"), strict=False):
                for kind in ("qcd", "top"):
                    chosen = values[name][kinds[sample] == KINDS.index(kind)].clamp(edges[0], edges[-1])
                    heights, _ = torch.histogram(chosen.float(), edges)
                    label = f"{LABELS[kind]}, {sample}"
                    axes.stairs(heights / heights.sum(), edges, color=COLOURS[kind], label=label, linestyle=style)
            axes.set_xlabel(name)
            axes.set_yticks([])
        axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("real", type=Path, help="a file of the reference data set")
    parser.add_argument("made", type=Path, help="a folder of `adammcmc jets generate`")
    parser.add_argument("--max-jets", type=int, help="of the real ones; four times as many made ones are taken")
    parser.add_argument("--output", type=Path, help="a picture of the observables side by side")
    options = parser.parse_args(argv)
    real = read_jets(options.real, options.max_jets)
    made = read_jets(options.made, 4 * len(real))
    share = float((real.kind == 1).float().mean())
    tops, others = made.of_kind("top"), made.of_kind("qcd")
    total = round(min(len(tops) / share, len(others) / (1 - share)))
    made = Jets.cat([tops[: round(share * total)], others[: round((1 - share) * total)]])
    print(f"real {real!r}\nmade {made!r}")
    real_values, made_values = observables(real), observables(made)
    print(f"{'':12} {'top: real':>18} {'made':>8} {'QCD: real':>18} {'made':>8}")
    for name in OBSERVABLES:
        cells = []
        for kind in (1, 0):
            a, b = real_values[name][real.kind == kind], made_values[name][made.kind == kind]
            cells.append(f"{a.mean():9.3f} +- {a.std() / len(a) ** 0.5:5.3f} {b.mean():8.3f}")
        print(f"{name:12} {cells[0]} {cells[1]}")
    print(f"AUC of telling real from made: {telling_apart(real, made)}")
    if options.output is not None:
        samples = {"reference": real_values, "made here": made_values}
        draw_observables(options.output, samples, {"reference": real.kind, "made here": made.kind})


if __name__ == "__main__":
    main()
