"""Pictures inside the page."""

import base64
import io
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from hesscond.report.html_report import LARGEST_SVG, picture, pictures


def opened(source):
    kind, _, content = source.partition(";base64,")
    return kind, base64.b64decode(content)


def test_names_that_are_no_mathematics_and_no_xml_are_drawn(make):
    text = "$\\frac{$_^<script>alert(1)</script>\x00\x1b学\u202e"
    run = make.run(
        "bnp", probes=[make.probe(kappa=k, kappa_preconditioned=k / 3, kappa_own=k / 3) for k in (1e4, 2e4, 5e4)]
    )
    hostile = replace(run, config=run.config | {"name": text, "run": run.config["run"] | {"method": text}})
    found = pictures([hostile], {"layer": "fc2", "unit": 3})
    drawn = [opened(one.source) for one in found]
    assert len(drawn) > 1
    for kind, content in drawn:
        assert kind == "data:image/svg+xml"
        tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(content).iter()}
        assert not tags & {"script", "image", "foreignObject", "a"}


def test_paths_keep_their_place_to_a_hundredth_of_a_point():
    figure = Figure(figsize=(2, 2))
    figure.subplots().plot(np.linspace(0, 1, 7), np.linspace(0, 1, 7) ** 2, gid="curve")
    plain = io.BytesIO()
    figure.savefig(plain, format="svg")
    kind, small = opened(picture(figure))
    assert kind == "data:image/svg+xml"

    def curve(svg):
        group = ElementTree.fromstring(svg).find(".//*[@id='curve']/*[@d]")
        return np.array([float(word) for word in group.get("d").split() if word not in "ML"])

    assert np.allclose(curve(small), curve(plain.getvalue()), atol=0.0051, rtol=0)


def test_a_scatter_of_many_points_becomes_a_small_png():
    figure = Figure(figsize=(3, 2))
    rng = np.random.default_rng(0)
    figure.subplots().plot(*rng.random((2, 5000)), "o", ms=1)
    kind, content = opened(picture(figure))
    assert kind == "data:image/png"
    assert Image.open(io.BytesIO(content)).size == (600, 400)
    assert len(content) < LARGEST_SVG
