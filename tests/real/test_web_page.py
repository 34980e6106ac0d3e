"""The page of a job in headless Chromium: of one that loses members, and of one that has 1,024.

With ``BAMBOO_SCREENSHOTS`` set to a folder, pictures of both are put there: those in ``docs/images``.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bamboo_ds.control.loop import AgentLoop
from bamboo_ds.control.web.access import Access, token_of
from bamboo_ds.control.web.feed import Feed
from bamboo_ds.control.web.server import WebServer
from bamboo_ds.observe.events import EventWriter
from bamboo_ds.secret import JobSecret

from ..support.browser import Browser
from ..support.jobs import RunningJob, bamboo_command, slow_until, write_config
from ..support.ports import free_port
from ..support.synthetic_job import SyntheticJob, four, thousand
from ..support.watching import wait_lost, wait_steps, wait_whole

pytestmark = pytest.mark.claim("guides/observing.md")

WINDOW = 1440, 900
SECRET = JobSecret("s" * 40)
#: Steps before the loss in a picture.
_SHOWN = 60
#: A name that would do harm if it became markup.
EVIL = "<img src=x onerror=\"document.title='owned'\">"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as found:
        found.scheme("light")
        found.size(*WINDOW)
        yield found


def picture(browser: Browser, name: str) -> None:
    """Pictures in both schemes, if they are asked for."""
    folder = os.environ.get("BAMBOO_SCREENSHOTS")
    browser.size(1440, 1700)
    browser.script("scrollTo(0, 0); document.activeElement.blur()")
    for scheme in ("light", "dark") if folder else ():
        browser.scheme(scheme)
        browser.picture(Path(str(folder), f"page-{name}-{scheme}.png"))
    browser.scheme("light")
    browser.size(*WINDOW)


class Served:
    """A made-up job on the real server, in this process; it may go on."""

    def __init__(self, job: SyntheticJob, folder: Path) -> None:
        self.job, self._path, self._told = job, folder / "events.jsonl", 0
        self.tell()
        self._feed = Feed(job.job, str(self._path))
        self._feed.know(job.overview())
        self.server = WebServer(self._feed, Access(SECRET, job.job), job.job, ("127.0.0.1", 0), None, AgentLoop())
        self.token = token_of(SECRET, job.job)

    def tell(self) -> None:
        """Write what has happened since."""
        with EventWriter(self._path) as writer:
            for event in self.job.events[self._told :]:
                writer.emit(event)
        self._told = len(self.job.events)
        if hasattr(self, "_feed"):
            self._feed.know(self.job.overview())


@contextmanager
def served(job: SyntheticJob, folder: Path) -> Iterator[Served]:
    """See :class:`Served`."""
    found = Served(job.until_now(), folder)
    try:
        yield found
    finally:
        assert found.server.close(10.0)


def cells(browser: Browser) -> list[str]:
    """What a screen reader says of the grid's cells, in their order."""
    return list(browser.script("return [...document.querySelectorAll('#grid button')].map((b) => b.ariaLabel)"))


def test_a_small_job(browser: Browser, tmp_path: Path) -> None:
    """What is shown of four members, two of them lost; it changes while the job goes on, and says so at its end."""
    with served(four(), tmp_path) as found:
        browser.log_in(found.server.url, found.token)
        assert browser.text("#job") == "gpt-demo" and "training" in browser.text("#state")
        assert browser.text("#t-step") == "167" and browser.text("#t-losses") == "2"
        assert browser.text("#t-shadows") == "3 of 4"
        assert cells(browser) == [
            "stage 0, owner m0, shadow m3, shadowed, owner computes 2.0 stages",
            "stage 1, owner m0, copy to m3, replica is being copied, owner computes 2.0 stages",
            "stage 2, owner m3, copy to m0, replica is being copied, owner computes 2.0 stages",
            "stage 3, owner m3, copy to m0, replica is being copied, owner computes 2.0 stages",
        ]
        assert "would be fatal" in browser.text("#next") and "step 131" in browser.text("#next")
        assert len(browser.all("#losses > li")) == 2 and len(browser.all("#plans tr")) == 8
        browser.click("#losses > li:last-child > button")
        browser.until("the survivors", lambda: browser.all("#losses .phases .bar"))
        detail = browser.text("#losses > li:last-child")
        assert "stage 2: m2 → m1" in detail and "died (SIGKILL)" in detail and "replicas back in" in detail
        assert len(browser.all("#losses .phases .bar")) == 3, "one for each survivor"
        browser.click("#grid button")
        browser.until("the member", lambda: "If it were lost now" in browser.text("#chosen"))
        found.job.train(1)
        found.tell()
        browser.until("the next step", lambda: browser.text("#t-step") == "168")
        found.job.heal()
        found.tell()
        browser.until("all replicas", lambda: browser.text("#t-shadows") == "complete")
        assert "Any one member can be lost" in browser.text("#next")
        found.job.finish(3)
        found.tell()
        browser.until("the end", lambda: "ended with exit code 3" in browser.text("#banner"))
        assert browser.complaints() == []


def test_the_keyboard_moves_through_the_grid(browser: Browser, tmp_path: Path) -> None:
    with served(SyntheticJob("keys", 2, 2).train(2), tmp_path) as found:
        browser.log_in(found.server.url, found.token)
        focused = "return document.activeElement.ariaLabel?.split(',')[0]"
        browser.script("document.querySelector('#grid [tabindex=\"0\"]').focus()")
        seen = [browser.script(focused)]
        for key in ("\ue014", "\ue015", "\ue012", "\ue012"):  # right, down, left, left
            browser.driver.switch_to.active_element.send_keys(key)
            seen.append(browser.script(focused))
        first, second = "stage 0 of pipeline 0", "stage 1 of pipeline 0"
        assert seen == [first, second, "stage 1 of pipeline 1", "stage 0 of pipeline 1", "stage 0 of pipeline 1"]
        browser.driver.switch_to.active_element.send_keys("\n")
        browser.until("it is chosen", lambda: browser.text("#chosen-title") == "Stage 0 of pipeline 1")
        assert browser.complaints() == []


def test_a_thousand_members(browser: Browser, tmp_path: Path) -> None:
    """Every role and every member has a cell; what changes is shown within moments."""
    with served(thousand(), tmp_path) as found:
        browser.log_in(found.server.url, found.token)
        told = cells(browser)
        assert len(told) == 1024
        assert sum("no replica" in each for each in told) == 2
        assert "128 pipelines of 8 stages" in browser.text("#grid-note")
        assert len(browser.all("#members .member")) == 1014
        assert "127 hosts · 4 zones" in browser.text("#members-note")
        picture(browser, "1024")
        assert browser.script("return document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
        begin = "const from = performance.now(); view.roles[5] = {...view.roles[5], state: 'lost'}; draw();"
        assert browser.script(f"{begin} return performance.now() - from") < 500, "milliseconds to draw it anew"
        browser.find("#search").send_keys("node-081")
        browser.until("one host", lambda: len(browser.all("#members .member:not(.dim)")) == 8)
        found.job.train(1)
        found.tell()
        browser.until("the next step", lambda: browser.text("#t-step") == "266")
        assert browser.complaints() == []


def test_names_are_only_text(browser: Browser, tmp_path: Path) -> None:
    """Hosts, the job, details of losses and notices may have any name; none of it becomes an element or code."""
    job = SyntheticJob(EVIL, 1, 3, [EVIL, "plain"]).train(2).notice(1, EVIL)
    job.lose(2, reason="lease", detail=EVIL).train(2).heal()
    with served(job, tmp_path) as found:
        browser.log_in(found.server.url, found.token)
        assert browser.text("#job") == EVIL
        browser.click("#losses button")
        browser.until("the detail", lambda: EVIL in browser.text("#losses .detail"))
        browser.click("#members .link")
        browser.until("the member", lambda: EVIL in browser.text("#chosen"))
        assert not browser.all("img") and not browser.all("[onerror]")
        assert EVIL in browser.driver.title and browser.driver.title != "owned"
        assert browser.complaints() == []


def test_a_narrow_window(browser: Browser, tmp_path: Path) -> None:
    browser.size(390, 844)
    with served(four(), tmp_path) as found:
        browser.log_in(found.server.url, found.token)
        assert browser.script("return document.documentElement.scrollWidth <= innerWidth")
        assert len(cells(browser)) == 4
        assert browser.complaints() == []


def test_the_server_goes_and_comes_back(browser: Browser, tmp_path: Path) -> None:
    """That is said, and the page goes on by itself."""
    job = SyntheticJob("away", 1, 2).train(2)
    with served(job, tmp_path) as found:
        browser.log_in(found.server.url, found.token)
        port = int(found.server.url.rpartition(":")[2])
        assert browser.complaints() == []
    browser.until("that is said", lambda: "No word from the job's leader" in browser.text("#banner"))
    assert "bamboo web --job away" in browser.text("#banner")
    again = Feed(job.job, str(tmp_path / "events.jsonl"))
    server = WebServer(again, Access(SECRET, job.job), job.job, ("127.0.0.1", port), None, AgentLoop())
    try:
        browser.until("it is back", lambda: browser.script("return document.getElementById('banner').hidden"))
        assert browser.text("#freshness") == "● live"
    finally:
        assert server.close(10.0)


def test_a_job_that_loses_members(browser: Browser, tmp_path: Path) -> None:
    """A worker, then the leader is killed; the page follows to the next leader, lets one leave, and stops the job."""
    port, go = free_port(), tmp_path / "go"
    observe = {"http": f"127.0.0.1:{port}", "control": True}
    config = write_config(tmp_path, {"observe": observe}, 4)
    arguments = ["--stages", "4", "--training-data", "--pause-s", "0.02", "--save-every", "50", *slow_until(go, 0.02)]
    with RunningJob(tmp_path, 4, arguments, config, options=["--emulate-hosts", "2"]) as job:
        wait_whole(job, 4)
        command = [bamboo_command(), "web", "--job", job.name]
        told = subprocess.run(command, env=job.env, capture_output=True, text=True, check=True, timeout=60).stdout
        fields = dict(line.split(None, 1) for line in told.splitlines())
        browser.log_in(fields["page:"].rstrip("/"), fields["token:"])
        assert browser.text("#job") == job.name and len(cells(browser)) == 4
        wait_steps(job, _SHOWN if os.environ.get("BAMBOO_SCREENSHOTS") else 3)
        victim = next(m for m in job.status()["members"] if not m["leader"])
        os.kill(victim["pid"], 9)
        browser.until("the loss", lambda: "died (SIGKILL)" in browser.text("#losses"))
        wait_whole(job, 3)
        browser.until("all replicas", lambda: browser.text("#t-shadows") == "complete")
        browser.click("#losses > li > button")
        browser.until("the survivors", lambda: len(browser.all("#losses .phases .bar")) == 3)
        if os.environ.get("BAMBOO_SCREENSHOTS"):
            wait_steps(job, _SHOWN // 2)
            picture(browser, "4")
        command = [bamboo_command(), "top", "--job", job.name, "--once"]
        wide = {**job.env, "COLUMNS": "80"}
        told = subprocess.run(command, env=wide, capture_output=True, text=True, check=True, timeout=60).stdout
        assert "losses 1" in told and "next loss: any one member can be lost" in told
        assert browser.complaints() == []
        leader = next(m for m in job.status()["members"] if m["leader"])
        for pid in (leader["agent_pid"], leader["pid"]):
            os.kill(pid, 9)
        wait_lost(job, 2)
        browser.until(
            "the next leader's page", lambda: browser.text("#t-losses") == "2" and not browser.all("body.stale")
        )
        wait_whole(job, 2)
        browser.complaints()  # of the time between
        leaver = next(m["id"].partition("-")[0] for m in job.status()["members"] if m["pid"] and not m["leader"])
        browser.script(
            "[...document.querySelectorAll('#members .link')].find((b) => b.innerText === arguments[0]).click()", leaver
        )
        browser.until("whom it is about", lambda: browser.text("#chosen-title") == f"Member {leaver}")
        browser.click("#chosen .button.bad")
        assert f"Let {leaver} leave?" in browser.text("#ask")
        browser.click("#ask-yes")
        browser.until(
            "it has left",
            lambda: f"{leaver} on host" in browser.text("#story") and "has left" in browser.text("#story"),
        )
        assert browser.complaints() == []
        browser.click("#stop")
        browser.click("#ask-no")
        assert not browser.script("return document.getElementById('ask').open")
        browser.click("#stop")
        browser.click("#ask-yes")
        result = job.finish()
        browser.until("that is said", lambda: "It was about to end" in browser.text("#banner"))
    assert result.exit_code == 143
