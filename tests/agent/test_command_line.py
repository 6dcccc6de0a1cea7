"""The agent as a program: how it is started, what it prints, how it exits, how it goes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from host.agent.main import run
from host.agent.result import EXIT_CODES, Outcome
from host.bundle import agent_bundle
from host.client import AgentClient
from host.errors import OperationError
from host.target import Target
from tests.agent.conftest import AGENT, Hypervisor, until
from tests.agent.requests import NODE_0, NODE_1, Json, bind_request

if TYPE_CHECKING:
    from collections.abc import Sequence

REPOSITORY = Path(__file__).parents[2]


def start(words: Sequence[str], folder: Path, request: bytes = b"{}") -> subprocess.CompletedProcess[bytes]:
    """Run the agent on an empty root folder."""
    return subprocess.run(
        [sys.executable, *words, "--root", str(folder), "version"],
        input=request,
        capture_output=True,
        check=False,
        cwd=REPOSITORY,
    )


def test_it_starts_from_the_repository_from_a_zip_and_from_memory(tmp_path: Path) -> None:
    """All three ways give the same answer."""
    bundle = tmp_path / "agent.pyz"
    bundle.write_bytes(agent_bundle())
    loader = (
        "import os,runpy,sys;i=sys.stdin.buffer;n=int(i.readline());f=os.memfd_create('agent');"
        "open(f,'wb',closefd=False).write(i.read(n));runpy.run_path('/proc/self/fd/%d'%f,run_name='__main__')"
    )
    sent = b"%d\n%s{}" % (len(agent_bundle()), agent_bundle())
    root = tmp_path / "root"
    ways = [(["-m", "host.agent"], b"{}"), ([str(bundle)], b"{}"), (["-c", loader], sent)]
    answers = [start(words, root, request) for words, request in ways]
    assert [answer.returncode for answer in answers] == [0, 0, 0]
    assert {answer.stdout for answer in answers} == {answers[0].stdout}
    assert json.loads(answers[0].stdout)["version"] == "v1"


def test_it_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    """It runs isolated from every installed package."""
    bundle = tmp_path / "agent.pyz"
    bundle.write_bytes(agent_bundle())
    done = start(["-IS", str(bundle)], tmp_path)
    assert done.returncode == 0, done.stderr
    names = zipfile.ZipFile(io.BytesIO(agent_bundle())).namelist()
    assert {"__main__.py", "agent/main.py", "agent/probe.py"} <= set(names)


def test_each_outcome_has_its_exit_code() -> None:
    """The workstation tells them apart."""
    assert EXIT_CODES == {
        Outcome.BAD_REQUEST: 2,
        Outcome.REFUSED: 3,
        Outcome.UNDONE: 4,
        Outcome.NOT_UNDONE: 5,
        Outcome.BUSY: 6,
    }


def ask(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: str, *words: str
) -> tuple[int, str, str]:
    """Run it in this process."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(request))
    code = run(words)
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.mark.parametrize("request_text", ["{", "[]", '{"devices": ["81:00"], "pool": "p", "driver": "nvidia"}'])
def test_a_bad_request_is_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, request_text: str
) -> None:
    """What isn't understood exits with 2 and one message."""
    code, out, err = ask(monkeypatch, capsys, request_text, "--root", str(tmp_path), "drain")
    assert (code, json.loads(out)["outcome"], err) == (2, "bad-request", "")
    assert "Traceback" not in out
    assert not (tmp_path / "var").exists()


def test_as_text_an_error_goes_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The engine's command plugin keeps standard output in the state, and shows standard error."""
    request = json.dumps(bind_request("serving", ["0000:99:00.0"], "nvidia"))
    code, out, err = ask(monkeypatch, capsys, request, "--root", str(tmp_path), "--format", "text", "drain")
    assert (code, out) == (3, "")
    assert err.startswith("refused: 0000:99:00.0 does not exist on this host")


def test_as_text_a_summary_ends_the_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A person reads what was done, or that nothing was."""
    code, out, err = ask(
        monkeypatch, capsys, '{"pool": "serving"}', "--root", str(tmp_path), "--format", "text", "release"
    )
    assert (code, err) == (0, "")
    assert out.startswith("release: nothing to do, all is as wanted.")


def test_a_closed_output_is_no_failure(tmp_path: Path) -> None:
    """A reader that went away does not turn a finished operation into a failed one."""
    words = [sys.executable, "-m", "host.agent", "--root", str(tmp_path), "release"]
    read, write = os.pipe()
    os.close(read)
    request = b'{"pool": "serving"}'
    done = subprocess.run(words, input=request, stdout=write, stderr=write, check=False, cwd=REPOSITORY)
    os.close(write)
    assert done.returncode == 0


@pytest.mark.simulator
def test_the_workstation_s_client_gets_results_errors_and_progress(kpro6: Hypervisor) -> None:
    """Sent in memory over SSH, the agent answers as the client expects."""
    simulator, lines = kpro6.simulator, list[str]()
    target = Target(
        address="127.0.0.1",
        port=simulator.ssh_port,
        user="root",
        host_key=simulator.host_key,
        root=".",
        private_key=simulator.identity_file.read_text(),
    )
    (kpro6.root / AGENT).unlink()
    request = bind_request("confidential", NODE_1, "vfio-pci", others=NODE_0)
    with AgentClient(target, on_progress=lines.append) as client:
        assert client.facts({})["version"] == "v1"
        with pytest.raises(OperationError) as error:
            client.call("drain", {**request, "managed": {}})
        assert error.value.outcome == "refused"
        assert client.call("bind", request)["changed"] is True
    assert any("→ vfio-pci" in line for line in lines)


@pytest.mark.simulator
def test_uninstall_waits_until_nothing_is_owed_and_then_leaves_nothing(kpro6: Hypervisor) -> None:
    """While the ledger answers for something it refuses; afterwards agent, ledger and lock are gone."""
    before = set(kpro6.simulator.contents())
    kpro6.done("bind", bind_request("serving", NODE_0 + NODE_1, "nvidia"))
    answer = kpro6.agent("uninstall")
    assert answer.code == 3
    assert NODE_0[0] in answer["message"]
    kpro6.done("release", {"pool": "serving", "managed": {}})
    assert kpro6.done("uninstall")["changed"]
    assert kpro6.simulator.own_files() == []
    assert {name for name in set(kpro6.simulator.contents()) - before if not name.startswith("proc/")} == set()


@pytest.mark.simulator
def test_a_missing_driverctl_is_refused_before_a_card_moves(kpro6: Hypervisor) -> None:
    """Without the tool that replays bindings at boot nothing is bound."""
    (kpro6.simulator.folder / "host/bin/driverctl").unlink()
    before = kpro6.host_state()
    answer = kpro6.agent("bind", bind_request("confidential", NODE_1, "vfio-pci", others=NODE_0))
    assert answer.code == 3
    assert "apt install driverctl" in answer["message"]
    assert kpro6.host_state() == before


@pytest.mark.simulator
def test_facts_take_no_lock_and_never_hang(kpro6: Hypervisor) -> None:
    """A preview reads while an operation runs, and names the card whose removal hangs."""
    kpro6.simulator.faults.unbind_hang(NODE_1[0])

    async def scenario() -> Json:
        request = bind_request("confidential", NODE_1, "vfio-pci", unbind_timeout_s=60)
        bind = asyncio.create_task(kpro6.agent_later("bind", request))
        await until(lambda: "override" in kpro6.kinds(), "the bind does not begin")
        facts = await kpro6.agent_later("facts")
        await asyncio.to_thread(kpro6.simulator.faults.clear)
        assert (await bind).code == 0
        return facts.result

    facts = asyncio.run(scenario())
    assert any(NODE_1[0] in error for error in facts["errors"])
    assert len(facts["devices"]) == 9
