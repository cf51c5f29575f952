"""Made-up runs for the report, and what is found on its page."""

import io
from html.parser import HTMLParser

from rich.console import Console

from hesscond.runs import RunLog, open_run


class Page(HTMLParser):
    """The elements of a page in order, each with its attributes; texts of elements that have only text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.open = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def inside(self, tag):
        return [text for name, text in self.texts if name == tag]

    @property
    def words(self):
        return " ".join(" ".join(text for tag, text in self.texts if tag not in ("script", "style")).split())


def logged(
    folder, method="bnp", seed=0, *, status="finished", message="", statements=(), probes=(), iterations=4, **run
):
    """A short run with the rows given, of unit 3 of the layer fc2 on mini-batches unless they say otherwise."""
    config = {
        "name": "fc-test",
        "description": "made up",
        "data": {"name": "digits"},
        "model": {"hidden": [100]},
        "training": {"batch_size": 60, "iterations": iterations},
        "probe": {"layers": ["fc2"], "units": [3]},
        "run": {"method": method, "seed": seed, "learning_rate": 0.1, "device": "cpu", "data_source": "made", **run},
    }
    log = RunLog(folder, config)
    at = {"epoch": 0, "layer": "fc2", "unit": 3}
    for iteration in range(iterations):
        log.training(iteration, 0, 2.0 / (1 + iteration))
    log.commit(
        evaluation=[{"iteration": iterations, "epoch": 0, "test_loss": 1.0, "test_accuracy": 0.5}],
        probe=[at | {"iteration": k, "data": "batch"} | probe for k, probe in enumerate(probes)],
        statements=[at | {"iteration": k, "data": "batch"} | row for k, row in enumerate(statements)],
    )
    log.close(status, message)
    return open_run(folder)


def probe(**facts):
    """A row of the probe table, resolved unless it says otherwise."""
    found = {"samples": 60, "n_params": 101, "dead": 0, "rank": 101, "nullity": 0, "negative": 0, "solver": "SVD; SVD"}
    for name in ("kappa", "kappa_preconditioned", "kappa_own"):
        found |= {name: 1e4, f"{name}_lower": 9e3, f"{name}_upper": 1.1e4}
    found |= {"resolved": 1, "resolved_preconditioned": 1, "resolved_own": 1}
    return found | {"kappa_D": 10.0, "coordinates": "BNP"} | facts


def printed(table, width=80):
    """A table as a console of that width shows it."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    return console.file.getvalue()


def artists(figure):
    """{identifier: artist} of a figure."""
    return {artist.get_gid(): artist for artist in figure.findobj() if artist.get_gid()}
