"""The picture of a topology, as text."""

from __future__ import annotations

from tests.facts import hosts
from topology.diagram import before_after, picture, planned, seen, to_svg, to_text
from topology.facts import Facts

FOUND = hosts.facts("kpro6", "found")
SPLIT = hosts.plan(hosts.split(), FOUND).spec

AFTER = """\
kpro6: 8 x NVIDIA RTX PRO 6000 Blackwell Server Edition, SEV-SNP on
╭─ NUMA node 0 ──────────────────────────────────╮╭─ NUMA node 1 ──────────────────────────────────╮
│   01:00.0 nvidia lxc 129 sglang-qwen           ││ > 81:00.0 vfio-pci vm 200                      │
│   11:00.0 nvidia lxc 129 sglang-qwen           ││ > 91:00.0 vfio-pci vm 200                      │
│   61:00.0 nvidia lxc 129 sglang-qwen           ││ > e1:00.0 vfio-pci vm 200                      │
│   71:00.0 nvidia lxc 129 sglang-qwen           ││ > f1:00.0 vfio-pci vm 200                      │
╰────────────────────────────────────────────────╯╰────────────────────────────────────────────────╯
╭─ services ───────────────────────────────────────────────────────────────────────────────────────╮
│ >  sglang-qwen  lxc 129  tp 4  on 4 GPUs  port 30000                                             │
╰──────────────────────────────────────────────────────────────────────────────────────────────────╯
"""


def test_the_split_is_drawn_with_its_differences_marked() -> None:
    """Driver, owner and tensor parallelism of what changes are marked without any colour."""
    assert to_text(picture(planned(FOUND, SPLIT), seen(FOUND))) == AFTER


def test_before_stands_above_after() -> None:
    """The found topology has no marks, the planned one is the same picture as alone."""
    before, _, after = to_text(before_after(FOUND, SPLIT)).partition("after ")
    assert before.startswith("before ")
    assert "tp 8  on 8 GPUs" in before
    assert ">" not in before
    assert after.partition("\n")[2] == AFTER


def test_a_host_that_is_as_planned_is_drawn_once() -> None:
    """Two equal pictures would have to be compared by eye."""
    drawn = to_text(before_after(FOUND, hosts.plan(hosts.whole(), FOUND).spec))
    assert drawn.count("NUMA node 0") == 1
    assert drawn.startswith("as it is, and as it must be ")


def test_the_split_host_looks_as_it_was_planned() -> None:
    """Seen on the host afterwards, the picture is the planned one."""
    facts = hosts.facts("kpro6", "split")
    assert to_text(picture(seen(facts))) == AFTER.replace(">", " ")


def test_every_line_fits_the_width() -> None:
    """In a narrow terminal the nodes stand below each other, and no line is longer than the terminal is wide."""
    for width in (60, 80, 100, 140):
        lines = to_text(before_after(FOUND, SPLIT), width=width).splitlines()
        assert max(map(len, lines)) <= width
    assert to_text(before_after(FOUND, SPLIT), width=80).count("sglang-qwen") == 8 + 1 + 4 + 1
    narrow = to_text(picture(seen(FOUND)), width=60)
    assert narrow.index("NUMA node 0") < narrow.index("71:00.0") < narrow.index("NUMA node 1")


def test_a_gpu_that_two_guests_are_given_shows_both() -> None:
    """A double assignment is what a picture must not hide; a free GPU says so."""
    raw = hosts.raw_facts("kpro6", "split")
    raw["vms"][0]["config"] += "hostpci7: 0000:71:00.0\n"
    raw["containers"][0]["config"] = raw["containers"][0]["config"].replace("/dev/nvidia0 ", "/dev/nvidia9 ")
    text = to_text(picture(seen(Facts.model_validate(raw))))
    assert "71:00.0 nvidia lxc 129 and vm 200" in text
    assert "01:00.0 nvidia no guest" in text


def test_a_host_without_services_and_numa_is_drawn() -> None:
    """Unknown NUMA nodes, other cards and no service still give a picture."""
    raw = hosts.raw_facts("kpro6", "found")
    raw["services"], raw["snp"] = [], None
    for device in raw["devices"]:
        device["numa_node"], device["name"] = -1, None
    text = to_text(picture(seen(Facts.model_validate(raw))))
    assert "kpro6: 8 GPUs, SEV-SNP unknown" in text
    assert "NUMA node unknown" in text
    assert "none" in text


def test_a_stopped_service_shows_its_units_tensor_parallelism() -> None:
    """Without a process the unit says what would run."""
    raw = hosts.raw_facts("kpro6", "found")
    raw["services"][0]["process"] = None
    assert "tp 8" in to_text(picture(seen(Facts.model_validate(raw))))


def test_colour_and_svg_show_the_same_topology() -> None:
    """Colour is asked for, and the SVG is the same each time."""
    drawing = before_after(FOUND, SPLIT)
    assert "\x1b[" in to_text(drawing, colour=True)
    assert "\x1b[" not in to_text(drawing)
    svg = to_svg(drawing, title="kpro6")
    assert svg.startswith("<svg")
    assert "vfio-pci" in svg
    assert svg == to_svg(drawing, title="kpro6")
