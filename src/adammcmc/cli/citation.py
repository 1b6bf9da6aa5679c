"""BibTeX entries to cite."""

from __future__ import annotations

import adammcmc

__all__ = ["bibtex"]

_PAPER = """\
@article{bieringer2023adammcmc,
  title = {{AdamMCMC}: Combining Metropolis Adjusted Langevin with Momentum-based Optimization},
  author = {Bieringer, Sebastian and Kasieczka, Gregor and Steffen, Maximilian F. and Trabs, Mathias},
  journal = {arXiv preprint arXiv:2312.14027},
  year = {2023},
}"""
_SOFTWARE = """\
@software{adammcmc,
  title = {adammcmc: Metropolis-Hastings around Adam steps for neural networks, and exact samplers beside it},
  author = {{The adammcmc developers}},
  version = {VERSION},
  license = {Apache-2.0},
}"""


def bibtex() -> str:
    """The paper that introduced the algorithm, and this software. CITATION.cff holds the same entries.

    Example:
        >>> print(bibtex().splitlines()[0])
        @article{bieringer2023adammcmc,
    """
    return f"{_PAPER}\n\n{_SOFTWARE.replace('VERSION', adammcmc.__version__)}"
