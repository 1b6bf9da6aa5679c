"""Generate docs/cli.md from the commands and from the dataclasses of the configuration: python docs/commands.py"""

# ruff: noqa: E501  (paragraphs of Markdown)
from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from adammcmc.cli.commands import app
from adammcmc.cli.config import schema
from adammcmc.cli.options import Option, default_words, type_words

PAGE = Path(__file__).parent / "cli.md"

BEGIN = """\
# The command line

A configuration names a network, data, a loss and a sampler. The commands sample, resume, diagnose, report and predict. (This page is generated from the code: `python docs/commands.py`.)

```bash
adammcmc schema > my.toml             # a configuration with every key and its description; it runs as printed
adammcmc sample my.toml --dry-run     # the target, and the size and time of the run
adammcmc sample my.toml               # draws go to runs/my; after Ctrl-C, `adammcmc resume runs/my` continues bit for bit
adammcmc check runs/my                # verify every file of the run; --repair fixes what it can
adammcmc diagnose runs/my             # the verdict, R-hat, effective sample size, calibration
adammcmc report runs/my               # all of it as one HTML page with figures, runs/my/report.html
adammcmc predict runs/my new.npz --output predictions.csv
```

A network of your own, in `my_network.py` beside the configuration, and data in a file:

```toml
[model]
name = "my_network:make_network"      # module:attribute: a network, or a class or function that returns one
arguments = { width = 64 }
weights = "trained.safetensors"       # the chains start there; or train first, with [training] steps = 1000

[data]
train = "train.npz"                   # np.savez("train.npz", inputs=x, targets=y); or module:attribute
test = "test.npz"

[loss]
name = "cross_entropy"

[sampler]
name = "AdamMCMC"                     # without this section: Underdamped, which is exact and tunes itself
lr = 1e-3
sigma = [1e-4, 3e-4, 1e-3, 3e-3]      # one for each chain: a scan
sigma_along = 2.0

[prior]
name = "Gaussian.fan_in"
gain = 2.0

[run]
num_chains = 4
num_draws = 100
gap = 50
batch_size = 128
```

Paths are relative to the configuration file. Modules are found beside it, or in the working directory. The run folder stores the configuration, including the changes by `--set`, so that `resume`, `diagnose`, `report` and `predict` need only the folder.

A configuration is a program: it imports the modules that it names. `adammcmc sample my.toml` does so because you named the file. A run folder may come from someone else, so the commands that open one import nothing unless you add `--trust-code` (or set `ADAMMCMC_TRUST_CODE=1`), or give `--config` with a file of your own. Runs of bundled tasks need neither. See [what is promised](security.md) about files from others.

A module that a configuration names is loaded from beside the configuration or from the working directory before any installed module of that name. The imports of that module search these folders last. Rename a file that has the name of a module of Python's standard library, such as `html.py`.

An unknown key, a value of the wrong type or an unknown name is a one-line error with the place and the nearest known name.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | error, with one line on standard error; or `check` found damage. `--debug`, anywhere, shows the traceback |
| 2 | invalid command line |
| 130, 143, 129 | stopped by Ctrl-C, by SIGTERM, by SIGHUP (a closed terminal); completed draws are kept |

## Commands
"""

SCHEMA = """\
## The configuration

Every key, read from the dataclasses and signatures that accept it. `--set section.key=value` changes one on the command line. TOML has no None: where a description says None, leave the key out.

A list of numbers, where one is expected, gives each chain its own value. A sampler of your own is `name = "module:attribute"` in `[sampler]`, a function of parameters and options; the other keys of the section are passed to it.
"""


def page() -> str:
    """The whole page."""
    group = typer.main.get_command(app)
    return "\n".join([BEGIN, *_commands(group, "adammcmc"), SCHEMA, *_schema()]).rstrip() + "\n"


def _commands(group: Any, path: str) -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield f"### {path} {name}\n\n{_text(command.help)}\n"
            yield from _commands(command, f"{path} {name}")
            continue
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        words = " ".join(_argument(p) for p in arguments)
        yield f"### {path} {name}\n\n{_text(command.help)}\n"
        yield f"```text\n{path} {name} {words}".rstrip() + " [OPTIONS]\n```\n"
        if rows := [*_rows(command)]:
            yield "| | default | |\n|---|---|---|"
            yield from rows
            yield ""


def _rows(command: Any) -> Iterator[str]:
    for p in command.params:
        if p.name == "help":
            continue
        name = p.name.upper() if p.param_type_name == "argument" else ", ".join([*p.opts, *p.secondary_opts])
        is_flag = getattr(p, "is_flag", False)
        default = "" if p.default is None or is_flag or p.required or callable(p.default) else f"`{_plain(p.default)}`"
        yield f"| `{name}` | {default} | {_cell(p.help or '')} |"


def _argument(p: Any) -> str:
    return p.name.upper() if p.required else f"[{p.name.upper()}]"


def _plain(value: Any) -> str:
    if isinstance(value, tuple | list):
        return " ".join(map(str, value))
    return str(getattr(value, "value", value))


def _text(text: str | None) -> str:
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text or "").split("\n\n"))


def _schema() -> Iterator[str]:
    for heading, text, options in schema():
        title = f"`{heading}`" if heading else "At the top"
        yield f"### {title}\n\n{_escaped(text) if heading else 'Before the first section.'}\n"
        if options:
            yield "| key | type | default | |\n|---|---|---|---|"
            yield from (_option(option) for option in options)
            yield ""


def _option(option: Option) -> str:
    least = "" if option.least is None else f", at least {option.least}"
    default = default_words(option.default)
    default = default if default in ("", "required") else f"`{default}`"
    return f"| `{option.name}` | {_cell(type_words(option.kind))}{least} | {default} | {_cell(option.help)} |"


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split()))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


if __name__ == "__main__":
    PAGE.write_text(page())
