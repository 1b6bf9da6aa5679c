"""The report: the verdict first, in words; a page that needs no network; looked at in a real browser where there is one."""

from __future__ import annotations

import re
import shutil
import urllib.parse
import warnings
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import adammcmc
from adammcmc import AdamMCMC, Gaussian, GaussianNLL, Posterior, Underdamped
from adammcmc.posterior.report import write_report

NAUGHTY = "<script>alert('x')</script> & \"quotes\""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2))


def points(number: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 2, generator=generator)
    noise = 0.5 * torch.randn(number, generator=generator)
    return x, (x[:, 0] * x[:, 1] + noise > 0).long()


def sampled(sampler: Any = None, **options: Any) -> Posterior:
    """Two chains on 120 points."""
    settings = {"num_draws": 30, "gap": 5, "burn_in": 200, "num_chains": 2, "progress": False} | options
    return adammcmc.sample(network(), points(120), F.cross_entropy, sampler=sampler, **settings)


def far_apart() -> list[dict[str, torch.Tensor]]:
    """Starting points on both sides of a hill that short steps never cross."""
    start = network().state_dict()
    return [{name: x + shift for name, x in start.items()} for shift in (-2.0, 2.0)]


EXACT = partial(Underdamped, step_size=0.02, prior=Gaussian())
SICK = {
    # name: a run, and what the first screen must say
    "lambda far too small": (
        lambda: sampled(partial(EXACT, inverse_temperature=1e-6), burn_in=50, gap=10),
        "almost no influence",
    ),
    "stuck": (lambda: sampled(partial(Underdamped, step_size=20.0, prior=Gaussian()), burn_in=50, gap=10), "stuck"),
    "batch noise": (
        lambda: sampled(
            partial(AdamMCMC, lr=0.05, sigma=0.05, sigma_along=1.0, prior=Gaussian()), batch_size=4, burn_in=50, gap=10
        ),
        "too hot",
    ),
    "chains disagree": (
        lambda: sampled(
            partial(Underdamped, step_size=0.001, prior=Gaussian()), initial=far_apart(), burn_in=20, gap=10, num_draws=30
        ),
        "chains disagree",
    ),
}


@pytest.fixture(scope="module")
def well(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Posterior]:
    posterior = sampled()
    path = tmp_path_factory.mktemp("report") / "page.html"
    data = points(80, seed=1)
    posterior.report(path, data, names=[f"{NAUGHTY} {i}" for i in range(80)], title=NAUGHTY, progress=False)
    return path, posterior


class Page(HTMLParser):
    """Tags, attributes, text, and what is open at the end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "path", "use", "rect", "line", "br", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += "" if self.open[-1:] == ["style"] else data


def test_it_is_one_page_that_fetches_nothing(well: tuple[Path, Posterior]) -> None:
    text = well[0].read_text()
    page = Page(text)
    assert page.open == []
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "img", "iframe")]
    assert "@import" not in text
    assert "url(http" not in text
    addresses = [a[key] for _, a in page.tags for key in ("href", "src", "xlink:href") if key in a]
    assert addresses
    assert all(address.startswith(("#", "page_figures/")) for address in addresses if address)
    assert any(a.get("http-equiv") == "Content-Security-Policy" for _, a in page.tags)


def test_what_users_write_is_text(well: tuple[Path, Posterior]) -> None:
    text = well[0].read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert NAUGHTY in Page(text).words


def test_target_and_verdict_come_first(well: tuple[Path, Posterior]) -> None:
    path, posterior = well
    words = Page(path.read_text()).words
    summary = posterior.summary(points(80, seed=1))
    headline = {"sick": "Do not trust", "undecided": "No problem was found", "sound": "No problems found"}[summary.grade]
    places = [words.index(part) for part in (headline, posterior.target, "Key numbers", "Traces", "Settings of the run")]
    assert places == sorted(places)


def test_every_figure_is_a_file_and_says_in_words_what_it_shows(well: tuple[Path, Posterior]) -> None:
    path, _ = well
    page = Page(path.read_text())
    figures = [a for tag, a in page.tags if tag == "svg"]
    files = sorted(f.name for f in path.with_name("page_figures").iterdir())
    assert files == ["acceptance.svg", "burn-in.svg", "loss.svg", "potential.svg", "reliability.svg", "risk.svg", "spread.svg"]
    assert len(figures) == len(files)
    ids = [a["id"] for _, a in page.tags if a.get("id")]
    assert len(ids) == len(set(ids))
    for a in figures:
        assert a["role"] == "img"
        assert all(name in ids for name in (a["aria-labelledby"] or "").split())
    for name in files:
        svg = (path.with_name("page_figures") / name).read_text()
        assert svg.count("<svg") == 1
        assert "prefers-color-scheme" in svg
        assert not re.search(r"#0[0-9a-f]{5}\b|#1[0-9a-b]{5}\b", svg.split("</style>", 1)[1])  # no colour is left as it was


def test_the_words_of_a_figure_are_its_numbers(well: tuple[Path, Posterior]) -> None:
    path, posterior = well
    words = Page(path.read_text()).words
    trace = posterior.trace("potential")[0]
    half = len(trace) // 2
    assert f"Chain 0: mean {float(trace[:half].mean()):.4g} in the first half" in words


@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_is_called_so_on_the_first_screen(name: str, tmp_path: Path) -> None:
    make, says = SICK[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = make()
    path = write_report(posterior, tmp_path / "sick.html", data=points(40, seed=1), progress=False)
    first_screen = Page(path.read_text()).words.split("What was sampled")[0]
    assert "Do not trust these draws" in first_screen
    assert re.search(says, first_screen, re.IGNORECASE), first_screen


def test_without_data_it_says_what_it_cannot_tell(well: tuple[Path, Posterior], tmp_path: Path) -> None:
    path = well[1].report(tmp_path / "bare.html")
    words = Page(path.read_text()).words
    assert "to compare the chains' predictions" in words
    assert "Are the predictions right?" not in words


def test_regression_shows_coverage(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 2)
    y = x.sum(1, keepdim=True) + 0.3 * torch.randn(60, 1)
    posterior = adammcmc.sample(nn.Linear(2, 1), (x, y), GaussianNLL(0.3), num_draws=20, gap=3, burn_in=100, progress=False)
    path = posterior.report(tmp_path / "values.html", (x, y), progress=False)
    words = Page(path.read_text()).words
    assert "Does interval coverage match the level?" in words
    assert "negative log likelihood" in words
    assert "the same for one Gaussian" in words
    assert (tmp_path / "values_figures" / "coverage.svg").exists()


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "ending": ({"path": "report.pdf"}, ValueError, r"must be an \.html file"),
    "folder": ({"path": "nowhere/report.html"}, FileNotFoundError, "does not exist"),
    "names": ({"names": ["one"]}, ValueError, "one name for each example"),
    "iterator": ({"data": iter([torch.zeros(4, 2)])}, TypeError, "read more than once"),
    "names without data": ({"names": ["one"], "data": None}, ValueError, "one name for each example"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_and_nothing_is_written(name: str, well: tuple[Path, Posterior], tmp_path: Path) -> None:
    options, kind, words = BAD[name]
    settings = {"path": "report.html", "data": points(8, seed=1)} | options
    with pytest.raises(kind, match=words):
        well[1].report(tmp_path / settings.pop("path"), settings.pop("data"), progress=False, **settings)
    assert list(tmp_path.iterdir()) == []


# --- in a browser ----------------------------------------------------------------------------------------------------------


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium (Debian: apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def _open(browser: Any, path: Path, **options: Any) -> tuple[Any, list[str]]:
    page = browser.new_page(**options)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: wrong.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(path.as_uri())
    return page, wrong


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out_in_both_schemes(scheme: str, browser: Any, well: tuple[Path, Posterior]) -> None:
    page, wrong = _open(browser, well[0], color_scheme=scheme, viewport={"width": 1000, "height": 800})
    paper = page.eval_on_selector("body", "e => getComputedStyle(e).backgroundColor")
    checked = {"body": ("color", 7), ".quiet": ("color", 4.5), "a[href^='#num']": ("color", 4.5), ".verdict h2": ("color", 4.5)}
    for selector, (name, least) in checked.items():
        ink = page.eval_on_selector(selector, f"e => getComputedStyle(e).{name}")
        assert _contrast(ink, paper) >= least, (selector, ink, paper)
    for drawn in ("svg text", "#figure-potential svg path[style*='--s0']"):
        style = page.eval_on_selector(drawn, "e => [getComputedStyle(e).fill, getComputedStyle(e).stroke]")
        shown = [s for s in style if s.startswith("rgb") and s != "rgba(0, 0, 0, 0)"]
        assert max(_contrast(s, paper) for s in shown) >= 3, (drawn, style)
    assert (_luminance(paper) > 0.5) == (scheme == "light")
    assert wrong == []
    page.close()


def test_a_narrow_screen_does_not_scroll_sideways(browser: Any, well: tuple[Path, Posterior]) -> None:
    page, wrong = _open(browser, well[0], viewport={"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    heights = page.eval_on_selector_all(
        "figure svg text", "all => all.map(e => e.getBoundingClientRect()).map(r => Math.min(r.width, r.height))"
    )
    assert min(heights) >= 5  # a single digit is narrow
    sizes = page.eval_on_selector_all(
        "figure svg", "all => all.map(e => e.getBoundingClientRect().width / e.viewBox.baseVal.width)"
    )
    assert min(sizes) * 10 >= 9  # letters of 10 points in the drawing, in pixels on the screen
    assert wrong == []
    page.close()


def test_all_can_be_reached_with_the_keyboard(browser: Any, well: tuple[Path, Posterior]) -> None:
    page, _ = _open(browser, well[0], viewport={"width": 1000, "height": 800})
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0  # shown when it has the focus
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.tagName + (document.activeElement.className || '')"))
    assert {"A", "SUMMARY", "DIVscroll"} <= reached
    page.focus("summary")
    page.keyboard.press("Enter")
    assert page.evaluate("document.querySelector('details').open")
    page.close()


def test_a_reader_of_the_screen_hears_what_figures_show(browser: Any, well: tuple[Path, Posterior]) -> None:
    page, _ = _open(browser, well[0])
    image = page.get_by_role("img", name="Do predicted probabilities match observed frequencies?")
    assert image.count() == 1
    assert page.get_by_role("heading", level=1).count() == 1
    figures = page.locator("figure").count()
    assert page.get_by_role("table").count() + figures == page.get_by_role("region").count() - page.locator("section").count()
    page.close()


def _luminance(colour: str) -> float:
    parts = [float(x) / 255 for x in re.findall(r"[\d.]+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(a: str, b: str) -> float:
    """Of two colours, as the accessibility guidelines have it: 1 to 21."""
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


# --- what it says is so ------------------------------------------------------------------------------------------------------


def test_the_most_uncertain_examples_are_those(well: tuple[Path, Posterior]) -> None:
    path, posterior = well
    prediction = posterior.predict(points(80, seed=1), progress=False)
    order = prediction.mutual_information.argsort(descending=True)[:12].tolist()
    text = path.read_text().split("The examples with the largest mutual information</caption>")[1].split("</table>")[0]
    shown = re.findall(r'<th scope="row">[^<]*?(\d+)</th>', text)
    assert [int(x) for x in shown] == order
    right = (prediction.labels == points(80, seed=1)[1])[order].tolist()
    assert re.findall(r"<td>(yes|no)</td></tr>", text) == ["yes" if r else "no" for r in right]


def test_the_words_of_acceptance_and_spread_are_their_numbers(well: tuple[Path, Posterior]) -> None:
    path, posterior = well
    words = Page(path.read_text()).words
    shares = posterior.trace("num_accepted") / 5
    low, high = sorted(shares.mean(1).tolist())
    assert f"with means between {low:.2f} and {high:.2f}" in words
    prediction = posterior.predict(points(80, seed=1), progress=False)
    is_right = prediction.labels == points(80, seed=1)[1]
    spread = prediction.spread.gather(1, prediction.labels[:, None])[:, 0].double()
    for name, some in (("right", is_right), ("wrong", ~is_right)):
        assert f"{name} ({int(some.sum())} examples): median {float(spread[some].quantile(0.5)):.3g}" in words


def test_targets_that_cannot_be_scored_do_not_cost_the_page(well: tuple[Path, Posterior], tmp_path: Path) -> None:
    x, y = points(20, seed=1)
    path = well[1].report(tmp_path / "soft.html", (x, F.one_hot(y).float()), progress=False)
    words = Page(path.read_text()).words
    assert "Not scored: labels must be class numbers" in words
    assert "The examples with the largest mutual information" in words


def test_moments_alone_have_their_traces(tmp_path: Path) -> None:
    posterior = sampled(keep="moments", num_draws=6)
    path = posterior.report(tmp_path / "moments.html")
    assert (tmp_path / "moments_figures" / "potential.svg").exists()
    assert "12 draws of 2 chains" in Page(path.read_text()).words


def test_self_tests_keep_their_chain_if_the_checkpoint_of_another_is_lost(tmp_path: Path) -> None:
    posterior = sampled(EXACT, num_draws=4, burn_in=0, stacked=False)
    posterior.store._saved.pop(0)  # type: ignore[attr-defined]
    page = write_report(posterior, tmp_path / "page.html").read_text()
    table = page[page.index("<caption>Self-tests") :]
    assert re.findall(r'<th scope="row">(.*?)</th>', table[: table.index("</table>")]) == ["chain 1"]


def test_odd_names_are_quoted_in_addresses(well: tuple[Path, Posterior], tmp_path: Path) -> None:
    name = "50% of #1? a:b"
    path = well[1].report(tmp_path / f"{name}.html", progress=False)
    page = Page(path.read_text())
    links = [a["href"] for tag, a in page.tags if tag == "a" and (a.get("href") or "").endswith(".svg")]
    assert len(links) == 4
    for link in links:
        assert link is not None
        address = urllib.parse.urljoin(path.as_uri(), link)
        assert Path(urllib.parse.unquote(urllib.parse.urlsplit(address).path)).is_file()
    assert f"{name}_figures/loss.svg" in page.words  # read, not followed


def test_figures_of_an_earlier_report_do_not_stay(well: tuple[Path, Posterior], tmp_path: Path) -> None:
    path, folder = tmp_path / "again.html", tmp_path / "again_figures"
    well[1].report(path, points(20, seed=1), progress=False)
    assert (folder / "reliability.svg").exists()
    (folder / "mine.svg").write_text("of the user")
    well[1].report(path, progress=False)
    assert sorted(p.stem for p in folder.iterdir()) == ["acceptance", "burn-in", "loss", "mine", "potential"]


def test_figures_are_not_written_through_a_link(well: tuple[Path, Posterior], tmp_path: Path) -> None:
    """Those of an earlier report would be deleted there, too."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "spread.svg").write_text("of the user")
    (tmp_path / "report_figures").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="report_figures' must be a plain folder"):
        well[1].report(tmp_path / "report.html", progress=False)
    assert [p.name for p in (tmp_path / "elsewhere").iterdir()] == ["spread.svg"]


def test_one_example_and_one_chain_are_one(tmp_path: Path) -> None:
    posterior = sampled(num_chains=1, num_draws=4)
    words = Page(posterior.report(tmp_path / "one.html", points(1, seed=1), progress=False).read_text()).words
    assert "1 held-out example: " in words
    assert "(error unknown)" in words
    assert "The example with the largest mutual information" in words
    assert "1 examples" not in words
    assert "1 chains" not in words
    assert "nan" not in words


def test_the_modes_of_the_network_are_words(well: tuple[Path, Posterior]) -> None:
    assert re.search(r"modes \(train or eval\)\s*train", Page(well[0].read_text()).words)


def test_scores_have_their_errors(well: tuple[Path, Posterior]) -> None:
    path, posterior = well
    text = path.read_text()
    scores = posterior.score(points(80, seed=1), progress=False)
    assert isinstance(scores, adammcmc.ClassScores)
    for measured in (scores.accuracy, scores.nll, scores.brier):
        assert f"<dd>{measured.value:.3f} ± {measured.error:.3f}</dd>" in text
    assert "?. File:" not in Page(text).words
