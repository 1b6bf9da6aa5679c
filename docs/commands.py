"""Writes docs/cli.md from the commands and the configuration's own dataclasses and signatures: python docs/commands.py"""

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

A configuration names a network, data, a loss and a sampler; the command draws, stops and goes on, diagnoses, reports and predicts. (This page is made from the code: `python docs/commands.py`.)

```bash
adammcmc schema > my.toml             # a configuration with every key and what it means; it runs as it is
adammcmc sample my.toml --dry-run     # what would be sampled, and the size and the time it would take
adammcmc sample my.toml               # draws go to runs/my; Ctrl-C stops, `adammcmc resume runs/my` goes on, bit for bit
adammcmc check runs/my                # verify every file of the run; --repair fixes what it can
adammcmc diagnose runs/my             # the verdict, R-hat, effective draws, calibration
adammcmc report runs/my               # all of it as one HTML page with figures, runs/my/report.html
adammcmc predict runs/my new.npz --output predictions.csv
```

A network of your own, in `my_network.py` beside the configuration, and data in a file:

```toml
[model]
name = "my_network:make_network"      # module:attribute: a network, or a class or function that makes one
arguments = { width = 64 }
weights = "trained.safetensors"       # its chains start there; or let [training] steps = 1000 of Adam come first

[data]
train = "train.npz"                   # np.savez("train.npz", inputs=x, targets=y); or module:attribute
test = "test.npz"

[loss]
name = "cross_entropy"

[sampler]
name = "AdamMCMC"                     # without this section it is Underdamped: exact, and it tunes itself
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

Paths are relative to the configuration file, and modules are looked for beside it and where you are. The run folder remembers the configuration, with what `--set` changed, so that `resume`, `diagnose`, `report` and `predict` need only the folder.
A configuration is a program: it imports the modules that it names. `adammcmc sample my.toml` does so because you named the file. A run folder may come from someone else, so the commands that open one import nothing unless you add `--trust-code` (or set `ADAMMCMC_TRUST_CODE=1`), or give `--config` with a file of your own; runs of bundled tasks need neither. [What is promised](security.md) about files from others.
A module that a configuration names is taken from beside the configuration or from the working directory before any installed one. What that module imports is looked for there last. A file with the name of a module of Python itself, such as `html.py`, must be renamed.
An unknown key, a value of another type or a name that is not there is an error of one line that says where, and what is nearest.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | it could not be done, and the line on standard error says why, or `check` found damage; `--debug`, anywhere, shows the traceback |
| 2 | the command line was not understood |
| 130, 143, 129 | stopped by Ctrl-C, by SIGTERM, by SIGHUP (a closed terminal); what was drawn is kept |

## Commands
"""

SCHEMA = """\
## The configuration

Every key, read off the dataclasses and signatures that take it. `--set section.key=value` changes one on the command line. TOML has no None: where the words say None, leave the key out.
A list of numbers where one is due gives each chain its own. A sampler of your own is `name = "module:attribute"` in `[sampler]`, a function of parameters and options; the other keys there are handed to it.
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
