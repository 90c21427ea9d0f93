"""The report of a real run, in a real browser."""

import json
import os
import re
import signal

import numpy as np
import pytest
from PIL import Image

from envfleet.learn.ppo import PPOOptions
from envfleet.learn.train import TrainOptions, train
from envfleet.runs.callbacks import RunCallback
from tests.e2e.browser import look, picture


class Kills(RunCallback):
    def begun(self, envs, start_steps):
        self.fleet = envs.fleet

    def iterated(self, iteration):
        self.number = iteration.number
        if iteration.number == 4:
            os.kill(self.fleet.worker_pids()[0], signal.SIGKILL)


class Stops(Kills):
    def should_stop(self):
        return self.number == 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run that lost a worker, was stopped, went on, and filmed itself."""
    path = tmp_path_factory.mktemp("runs") / "CartPole"
    options = TrainOptions(
        "CartPole-v1",
        n_envs=4,
        total_steps=64 * 20,
        backend="process",
        num_workers=2,
        eval_every=64 * 5,
        eval_episodes=3,
        video=True,
    )
    ppo = PPOOptions(n_steps=16, batch_size=32, n_epochs=2, hidden=(16,))
    train(options, ppo, path, Stops())
    train(options, ppo, path, RunCallback(), is_resumed=True)
    return path


@pytest.fixture(scope="module")
def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def page(folder):
    return (folder / "report.html").read_text()


PLOTS = """
    const drawn = [...document.querySelectorAll("figure")];
    return drawn.filter(f => f.querySelector("svg.plot")).map(f => ({
        title: f.querySelector("figcaption b").textContent,
        range: f.querySelector("svg.plot").dataset.range.split(" ").map(Number),
        lines: [...f.querySelectorAll("polyline")].map(line => ({
            label: line.dataset.label,
            points: [...line.points].map(p => [p.x, p.y]),
            box: [line.getBoundingClientRect().width, line.getBoundingClientRect().height],
        })),
    }));
"""


def values(plot, number):
    x0, x1, y0, y1 = plot["range"]
    points = plot["lines"][number]["points"]
    return [(x0 + x / 1000 * (x1 - x0), y1 - y / 1000 * (y1 - y0)) for x, y in points]


def test_the_charts_hold_the_points_that_were_measured(page, metrics, tmp_path):
    seen = look(page, PLOTS, tmp_path)
    plots = {plot["title"]: plot for plot in seen.answers}
    names = {
        "return": "mean_return",
        "value loss": "value_loss",
        "policy loss": "policy_loss",
        "entropy": "entropy",
        "KL divergence": "approx_kl",
        "clip fraction": "clip_fraction",
        "explained variance": "explained_variance",
        "learning rate": "learning_rate",
        "episode length": "mean_length",
        "steps per second": "env_steps_per_second",
    }
    for title, name in names.items():
        measured = [
            (line["env_steps"], line[name]) for line in metrics if line.get(name) is not None
        ]
        assert len(measured) >= 15
        _, _, y0, y1 = plots[title]["range"]
        found = values(plots[title], 0)
        assert len(found) == len(measured), title
        np.testing.assert_allclose(found, measured, rtol=1e-4, atol=2e-5 * (y1 - y0) + 0.02)
        width, height = plots[title]["lines"][0]["box"]
        assert width > 100, f"{title} is seen"
        assert height >= 0
    evaluated = [
        (line["env_steps"], line["evaluation_mean"])
        for line in metrics
        if "evaluation_mean" in line
    ]
    assert len(evaluated) == 4
    np.testing.assert_allclose(values(plots["return"], 1), evaluated, rtol=1e-3)


def test_the_page_has_nothing_to_complain_about(page, tmp_path):
    assert look(page, "return 1", tmp_path).console == []


def test_a_complaint_would_be_noticed(page, tmp_path):
    broken = page.replace("</main>", '<img src="https://example.org/x.png"></main>')
    seen = look(broken, "console.error('and this'); return 1", tmp_path)
    assert any("Content Security Policy" in line for line in seen.console)
    assert any("and this" in line for line in seen.console)


LOADED = """
    return performance.getEntriesByType("resource").map(one => one.name.slice(0, 40))
"""


def without_policy(page):
    """The page as it would be if it did not forbid itself to load anything."""
    changed = re.sub(r"<meta http-equiv=[^>]*>", "", page)
    assert changed != page
    return changed


def test_nothing_is_loaded_from_anywhere(page, tmp_path):
    seen = look(without_policy(page), LOADED, tmp_path)
    assert [name for name in seen.answers if not name.startswith("data:")] == []
    assert seen.console == []


def test_a_load_would_be_noticed(page, tmp_path):
    loading = without_policy(page).replace("</main>", '<img src="http://example.org/x"></main>')
    assert "http://example.org/x" in look(loading, LOADED, tmp_path).answers


def test_pointing_at_a_chart_tells_its_value(page, metrics, tmp_path):
    script = """
        const figure = [...document.querySelectorAll("figure.chart")].find(
            one => one.textContent.includes("value loss"));
        const plot = figure.querySelector("svg.plot"), tip = figure.querySelector(".tip");
        const box = plot.getBoundingClientRect();
        const wasHidden = tip.hidden;
        const place = {clientX: box.right - 1, clientY: box.top + 5};
        plot.dispatchEvent(new PointerEvent("pointermove", place));
        const text = tip.textContent, isHidden = tip.hidden;
        plot.dispatchEvent(new PointerEvent("pointerleave"));
        return {wasHidden, isHidden, text, isHiddenAgain: tip.hidden};
    """
    found = look(page, script, tmp_path).answers
    assert (found["wasHidden"], found["isHidden"], found["isHiddenAgain"]) == (True, False, True)
    last = [line for line in metrics if "value_loss" in line][-1]
    said = re.fullmatch(r"1,280 steps: value loss ([\d.e-]+)", found["text"])
    assert said, found["text"]
    assert float(said.group(1)) == pytest.approx(last["value_loss"], rel=0.01)


def test_the_command_is_copied(page, folder, tmp_path):
    script = """
        let copied = null;
        document.addEventListener("copy", () => { copied = getSelection().toString(); });
        Object.defineProperty(navigator, "clipboard", {value: {
            writeText: async text => { copied = text; }}});
        const button = document.querySelector("button.copy");
        button.click();
        await new Promise(done => setTimeout(done, 50));
        return {copied, label: button.textContent};
    """
    found = look(page, script, tmp_path).answers
    command = json.loads((folder / "run.json").read_text())["command"]
    assert found == {"copied": command, "label": "Copied"}


def test_without_a_clipboard_the_command_is_copied_by_selection(page, folder, tmp_path):
    script = """
        let copied = null;
        document.addEventListener("copy", () => { copied = getSelection().toString(); });
        Object.defineProperty(navigator, "clipboard", {value: undefined});
        document.execCommand = what => { document.dispatchEvent(new Event(what)); return true; };
        document.querySelector("button.copy").click();
        await new Promise(done => setTimeout(done, 50));
        return copied;
    """
    command = json.loads((folder / "run.json").read_text())["command"]
    assert " ".join(look(page, script, tmp_path).answers.split()) == command


def test_incidents_and_the_film_are_there(page, tmp_path):
    script = """
        const film = document.querySelector("video");
        for (let i = 0; i < 40 && film.readyState < 1; i++)
            await new Promise(done => setTimeout(done, 50));
        return {text: document.body.innerText, size: [film.videoWidth, film.videoHeight],
                breaks: document.querySelectorAll("line.break").length};
    """
    found = look(page, script, tmp_path).answers
    assert "death during" in found["text"]
    assert "killed by SIGKILL" in found["text"]
    assert "The run went on from a checkpoint:" in found["text"]
    assert found["breaks"] == 1
    assert found["size"] == [600, 400]


@pytest.mark.parametrize("width", [1280, 400])
def test_it_fits_wide_and_narrow_windows(width, page, tmp_path):
    script = """
        const outside = [...document.querySelectorAll("main *")].filter(one =>
            !one.closest(".scroll") && !one.closest("svg") && one.offsetWidth
            && one.getBoundingClientRect().right > innerWidth + 1);
        return {inner: innerWidth, page: document.documentElement.scrollWidth,
                outside: outside.map(one => one.outerHTML.slice(0, 80))};
    """
    found = look(page, script, tmp_path, width=width).answers
    assert found == {"inner": width, "page": width, "outside": []}


def test_it_is_light_and_dark_as_the_reader_has_it(folder, tmp_path):
    report = folder / "report.html"
    light = picture(report, tmp_path / "light.png", tmp_path, "--window-size=1280,900")
    dark = picture(
        report, tmp_path / "dark.png", tmp_path, "--window-size=1280,900", "--force-dark-mode"
    )
    means = [np.asarray(Image.open(path).convert("L")).mean() for path in (light, dark)]
    assert means[0] > 200
    assert means[1] < 60
    assert all(np.asarray(Image.open(path).convert("L")).std() > 5 for path in (light, dark))
