"""GPU lines of container configurations: recognised, compared by meaning, rewritten in place."""

from __future__ import annotations

import pytest

from host.agent.lxc_config import Wanted, parse, passes_exactly, plan_dev, renumbered, with_gpu_lines_of, with_raw

MAJORS = frozenset({195, 511})
HEAD = "#kept by hand\narch: amd64\ndev0: /dev/dri/renderD128,gid=104\nnet0: name=eth0\n"
TUN = "lxc.cgroup2.devices.allow: c 10:200 rwm\nlxc.mount.entry: /dev/net/tun dev/net/tun none bind,create=file\n"
SNAPSHOT = "\n[before]\nlxc.cgroup2.devices.allow: c 195:* rwm\nlxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind\n"


def mount(*names: str) -> str:
    """Mount entries of nvidia nodes."""
    return "".join(f"lxc.mount.entry: /dev/{name} dev/{name} none bind,optional,create=file\n" for name in names)


def allow(*rules: str) -> str:
    """Device rules of the container's control group."""
    return "".join(f"lxc.cgroup2.devices.allow: c {rule} rwm\n" for rule in rules)


def wanted(*minors: int, every: int = 8) -> Wanted:
    """These minors, on a host with so many GPUs on nvidia."""
    return Wanted(frozenset(minors), frozenset(range(every)), other_majors=frozenset({511}))


BESIDE = mount("nvidiactl", "nvidia-uvm")
RAW = HEAD + allow("195:*", "511:*") + TUN + mount(*(f"nvidia{n}" for n in range(4))) + BESIDE + SNAPSHOT


@pytest.mark.parametrize("text", [RAW, RAW.rstrip("\n"), HEAD, "", SNAPSHOT.lstrip("\n"), "a: b\r\n\n\nc: d\n"])
def test_a_configuration_keeps_its_text(text: str) -> None:
    """What is read and not changed is written as it was, but for a missing last newline."""
    assert parse(text).text().rstrip("\n") == text.rstrip("\n")


def test_only_the_main_section_counts() -> None:
    """Snapshots and the description say nothing of the present."""
    config = parse(f"#dev0: /dev/nvidia7\n{HEAD}{SNAPSHOT}", MAJORS)
    assert config.minors == frozenset()
    assert not config.pending_devices


@pytest.mark.parametrize(
    ("text", "minors"),
    [
        ("dev0: /dev/nvidia3\n", {3}),
        ("dev1: path=/dev/nvidia12,mode=0666\n", {12}),
        ("dev1: gid=44,path=/dev/nvidia2\n", {2}),
        ("lxc.mount.entry = /dev/nvidia5 dev/nvidia5 none bind 0 0\n", {5}),
        ("dev0: /dev/nvidiactl\nmp0: /dev/nvidia1,mp=/x\n", set()),
    ],
)
def test_gpu_nodes_are_recognised_in_every_form(text: str, minors: set[int]) -> None:
    """Both styles, with and without option names, `:` and `=`."""
    assert parse(text).minors == minors


@pytest.mark.parametrize(
    ("lines", "given", "right"),
    [
        (allow("195:*", "511:*") + mount("nvidia0", "nvidia1") + BESIDE, wanted(0, 1, every=2), True),
        (allow("195:*") + mount("nvidia0", "nvidia1") + BESIDE, wanted(0, 1, every=2), False),
        (allow("195:*", "511:*") + mount("nvidia0", "nvidia1") + BESIDE, wanted(0, 1), False),
        (allow("195:0", "195:1", "195:255", "511:*") + mount("nvidia1", "nvidia0") + BESIDE, wanted(0, 1), True),
        (
            allow("195:0", "195:1", "195:5", "195:255", "511:*") + mount("nvidia1", "nvidia0") + BESIDE,
            wanted(0, 1),
            False,
        ),
        (allow("195:0", "195:255", "511:*") + mount("nvidia1", "nvidia0") + BESIDE, wanted(0, 1), False),
        (allow("195:0", "195:255", "195:254", "511:*") + mount("nvidia0") + BESIDE, wanted(0), True),
        ("lxc.cgroup2.devices.allow: a\n" + mount("nvidia0") + BESIDE, wanted(0), True),
        (mount("nvidia0") + BESIDE, wanted(0), False),
        (allow("195:0", "195:255", "511:*") + mount("nvidia0", "nvidiactl"), wanted(0), False),
        ("dev5: /dev/nvidia0\ndev6: /dev/nvidiactl\ndev7: path=/dev/nvidia-uvm\n", wanted(0), True),
        ("dev5: /dev/nvidia0\ndev6: /dev/nvidiactl\ndev7: path=/dev/nvidia-uvm\n", wanted(0, 1), False),
        ("dev5: /dev/nvidia0\ndev6: /dev/nvidiactl\ndev7: path=/dev/nvidia-uvm\n", wanted(), False),
        ("", wanted(), True),
    ],
)
def test_configurations_are_compared_by_meaning(lines: str, given: Wanted, right: bool) -> None:
    """Exactly the wanted GPUs, whatever the style and order; a wildcard is right only where no card is a stranger's."""
    assert passes_exactly(parse(HEAD + lines + SNAPSHOT, MAJORS), given) is right


def test_raw_lines_are_narrowed_in_place() -> None:
    """Shrinking drops the other cards' lines and splits the wildcard where it stood; nothing else moves."""
    config = with_raw(parse(RAW, MAJORS), wanted(0, 2))
    assert config.text() == (
        HEAD + allow("195:0", "195:2", "195:255", "511:*") + TUN + mount("nvidia0", "nvidia2") + BESIDE + SNAPSHOT
    )
    assert passes_exactly(config, wanted(0, 2))


def test_raw_lines_grow_again() -> None:
    """Growing adds the missing cards after the last of their kind, and their rules."""
    small = with_raw(parse(RAW, MAJORS), wanted(0, 2))
    grown = with_raw(small, wanted(0, 1, 2, 3))
    assert passes_exactly(parse(grown.text(), MAJORS), wanted(0, 1, 2, 3))
    assert grown.text().endswith(SNAPSHOT)


def test_raw_rewriting_is_idempotent() -> None:
    """What was rewritten once is not rewritten again."""
    once = with_raw(parse(RAW, MAJORS), wanted(1))
    assert with_raw(parse(once.text(), MAJORS), wanted(1)).text() == once.text()


def test_a_wildcard_stays_where_the_container_owns_every_card() -> None:
    """A container with all the driver's cards keeps the line that its owner wrote."""
    config = with_raw(parse(HEAD + allow("195:*", "511:*") + mount("nvidia0") + BESIDE, MAJORS), wanted(0, 1, every=2))
    assert "c 195:* rwm" in config.text()
    assert passes_exactly(config, wanted(0, 1, every=2))


def test_raw_lines_for_a_container_that_had_none() -> None:
    """A new container gets rules for its cards, the control node and uvm, before its snapshots."""
    config = with_raw(parse(HEAD + SNAPSHOT, MAJORS), wanted(3))
    added = config.text().removeprefix(HEAD).partition("\n[before]")[0]
    lines = allow("195:3", "195:255", "511:*") + mount("nvidia3") + BESIDE
    assert sorted(added.splitlines()) == sorted(lines.splitlines())
    assert passes_exactly(config, wanted(3))


def test_raw_style_takes_dev_entries_away() -> None:
    """One node is passed once: devN entries of cards go when raw lines come; a foreign devN stays."""
    text = with_raw(parse(HEAD + "dev1: /dev/nvidia0\ndev2: /dev/nvidiactl\n", MAJORS), wanted(0)).text()
    assert "dev1" not in text
    assert "dev2" not in text
    assert "dev0: /dev/dri/renderD128" in text


def test_dev_entries_replace_raw_lines() -> None:
    """Raw lines leave the file, and each node gets the lowest free devN, writable for every user."""
    plan = plan_dev(parse(RAW, MAJORS), wanted(0, 1))
    assert plan.without_raw.text() == HEAD + TUN + SNAPSHOT
    assert plan.sets == {
        "dev1": "/dev/nvidia0,mode=0666",
        "dev2": "/dev/nvidia1,mode=0666",
        "dev3": "/dev/nvidiactl,mode=0666",
        "dev4": "/dev/nvidia-uvm,mode=0666",
    }
    assert plan.deletes == ()


def test_dev_entries_that_stay_keep_their_number() -> None:
    """Shrinking deletes only the cards that leave; a number is not deleted and set in one command."""
    lines = "dev1: /dev/nvidia0\ndev2: /dev/nvidia1\ndev3: /dev/nvidiactl\ndev4: /dev/nvidia-uvm\n"
    plan = plan_dev(parse(HEAD + lines, MAJORS), wanted(0))
    assert (plan.sets, plan.deletes) == ({}, ("dev2",))
    swapped = plan_dev(parse(HEAD + lines, MAJORS), wanted(0, 5))
    assert (swapped.sets, swapped.deletes) == ({"dev2": "/dev/nvidia5,mode=0666"}, ())


def test_found_lines_come_back_exactly() -> None:
    """Where nothing else changed, the file is as it was found, byte for byte."""
    found = parse(RAW, MAJORS)
    assert with_gpu_lines_of(with_raw(found, wanted(0)), found).text() == RAW


def test_found_lines_come_back_beside_later_changes() -> None:
    """A setting that somebody changed meanwhile stays; a card that another container has by now does not come back."""
    found = parse(RAW, MAJORS)
    edited = parse(with_raw(found, wanted(0)).text().replace("name=eth0", "name=eth1"), MAJORS)
    back = with_gpu_lines_of(edited, found, strangers=frozenset({2}))
    assert "name=eth1" in back.text()
    assert back.minors == {0, 1, 3}


def test_found_dev_entries_take_free_numbers() -> None:
    """A devN that somebody uses meanwhile for something else is not overwritten."""
    found = parse("dev0: /dev/nvidia0\n", MAJORS)
    back = with_gpu_lines_of(parse("dev0: /dev/ttyUSB0\n", MAJORS), found)
    assert back.text() == "dev0: /dev/ttyUSB0\ndev1: /dev/nvidia0\n"


@pytest.mark.parametrize(
    ("section", "pending"),
    [
        ("[pve:pending]\ndev0: /dev/nvidia1\n", True),
        ("[pve:pending]\ndelete: dev1\n[x]\n", True),
        ("[pve:pending]\ncores: 4\n", False),
    ],
)
def test_pending_device_changes_are_seen(section: str, pending: bool) -> None:
    """Changes that the next start would apply are no state to build on."""
    assert parse(HEAD + section).pending_devices is pending


def test_a_rule_for_a_major_of_an_earlier_boot_is_renumbered() -> None:
    """A dynamic major may be another driver's by now: its rule gets the same driver's new one, once."""
    text = allow("195:0", "195:255", "511:*") + mount("nvidia0", "nvidiactl", "nvidia-uvm")
    moved = Wanted(frozenset({0}), frozenset({0}), other_majors=frozenset({509}), moved_majors={511: 509})
    config = parse(text, MAJORS | {509})
    assert not passes_exactly(config, moved)
    mended = with_raw(config, moved)
    assert mended.text() == text.replace("511:*", "509:*")
    assert passes_exactly(mended, moved)
    both = parse(text + allow("509:*"), MAJORS | {509})
    assert not passes_exactly(both, moved)
    assert with_raw(both, moved).text().count("509:*") == 1
    assert "511" not in plan_dev(both, moved).without_raw.text()


def test_lines_are_renumbered_by_minors() -> None:
    """Nodes, mounts' targets, devN entries and rules follow their cards; what is no card's stays."""
    text = (
        "dev0: /dev/nvidia3,mode=0666\n" + allow("195:3", "195:31", "195:255", "195:*") + mount("nvidia3", "nvidiactl")
    )
    config = renumbered(parse(text, MAJORS), {}, {3: 12, 31: 3})
    assert config.text() == (
        "dev0: /dev/nvidia12,mode=0666\n"
        + allow("195:12", "195:3", "195:255", "195:*")
        + mount("nvidia12", "nvidiactl")
    )
    assert config == parse(config.text(), MAJORS)
