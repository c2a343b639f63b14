"""The pytest plugin. Registered by its module name both as entry point and in the root conftest, so that an
installed package and a bare checkout load it once.

Fixtures: ``device`` (an open smfree.cuda Device; one test per requested device) and ``measure`` (times and
records
points on it).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from smfree.measure import options, ranks
from smfree.measure.devices import DevicePool, alive, resolve
from smfree.measure.fixture import Measure
from smfree.measure.instruments import Instruments
from smfree.measure.log import RunLog
from smfree.measure.progress import Progress
from smfree.measure.records import SkipRecord, plain
from smfree.measure.saving import Saving
from smfree.measure.sharing import SharingHooks
from smfree.measure.tables import summary
from smfree.measure.versions import versions
from smfree.results.store import stable_machine_info


class Session:
    """Everything the plugin keeps for one pytest session (in the config's stash)."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.given = options.Given.of(config)
        self.log = RunLog()
        self.saving = Saving(config)
        self.progress = Progress(0)
        self._pool: DevicePool | None = None
        self._instruments: dict[int, Instruments] = {}

    @property
    def pool(self) -> DevicePool:
        """The devices; "auto" is resolved on first use."""
        if self._pool is None:
            specs = options.device_specs(self.config)
            found = resolve(specs, options.fallback_specs(self.config))
            self._pool = DevicePool(found[:1] if ranks.several() else found)
        return self._pool

    def open(self, spec: str) -> Any:
        """Open a device or end the session with one sentence."""
        try:
            device = self.pool.get(spec)
        except Exception as error:
            if type(error).__module__.startswith("smfree."):
                raise pytest.UsageError(str(error)) from None
            raise
        self.log.devices.setdefault(spec, f"{spec}: {device.name}, {device.clock_source} clock")
        return device

    def join(self) -> None:
        """Become one of several ranks, or end the session with one sentence."""
        try:
            self.pool.ranks = ranks.join(self.pool.specs[0])
        except Exception as error:
            if type(error).__module__.startswith("smfree."):
                raise pytest.UsageError(str(error)) from None
            raise

    def instruments(self, device: Any) -> Instruments:
        key = id(device)
        if key not in self._instruments:
            self._instruments[key] = Instruments(device)
        return self._instruments[key]

    def lost(self, spec: str, device: Any) -> str:
        """Forget a device that a test killed; returns what it said, empty when it lives."""
        reason = alive(device)
        if reason:
            self._instruments.pop(id(device), None)
            self.pool.drop(spec)
        return reason

    def close(self) -> None:
        self._instruments.clear()
        if self._pool is not None:
            self._pool.close()


SESSION = pytest.StashKey[Session]()


def session_of(config: pytest.Config) -> Session:
    return config.stash[SESSION]


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "points(function): parametrize by the points that function(axes, spec) yields for each device; they "
        "have an id",
    )
    config.addinivalue_line("markers", f"{ranks.COLLECTIVE}: the ranks of the benchmark may be processes")
    problem = options.impossible(config)
    if problem is not None:
        raise pytest.UsageError(problem)
    if ranks.place()[0] > 0:
        ranks.save_nothing(config)
        config.pluginmanager.register(ranks.QuietHooks(), "smfree-quiet")
    config.stash[SESSION] = Session(config)
    session_of(config).saving.take_compare_option()


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    ours = session_of(session.config)
    for spec in options.device_specs(session.config) if not ranks.several() else ():
        if spec != "auto":  # what was asked for by name must be there; nothing is opened otherwise
            ours.open(spec)
    ours.saving.install(lambda: [(spec, ours.pool.identity(spec)) for spec in ours.pool.specs])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" not in metafunc.fixturenames or not _uses_our_device(metafunc):
        return
    specs = session_of(metafunc.config).pool.specs
    mark = metafunc.definition.get_closest_marker("points")
    if mark is None:
        metafunc.parametrize("device", specs, ids=specs, indirect=True)
        return
    (points,) = mark.args
    pairs = [
        (spec, point) for spec in specs for point in points(options.axes_for(metafunc.config, spec), spec)
    ]
    ids = [f"{spec}-{point.id}" for spec, point in pairs]
    metafunc.parametrize(("device", "point"), pairs, ids=ids, indirect=["device"])


def _uses_our_device(metafunc: pytest.Metafunc) -> bool:
    """False where a test or another conftest brings its own ``device``."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
        listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        if "device" in listed:
            return False
    found = metafunc.definition._fixtureinfo.name2fixturedefs.get("device", ())
    return bool(found) and found[-1].func.__module__ == __name__


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = session_of(config)
    measured = [item for item in items if _measures(item)]
    if not measured:
        return
    if not hasattr(config, "_benchmarksession"):
        raise pytest.UsageError("benchmarks on a device need pytest-benchmark; leave -p no:benchmark out")
    refused = ours.given.refused()
    if refused:
        raise pytest.UsageError("; ".join(refused))
    if not ours.given.wants_table():
        config._benchmarksession.quiet = True
    if ranks.several():
        ours.join()
    count = 1 if ranks.several() else options.jobs(config, ours.pool.specs)
    if count > 1 and len(measured) > 1:
        config.pluginmanager.register(SharingHooks(measured, ours.log, count), "smfree-sharing")
    ours.progress = Progress(len(measured))
    if ours.progress.enabled and config.get_verbosity() <= 0:
        names = {item.nodeid: item.name for item in measured}
        config.pluginmanager.register(ProgressHooks(ours.progress, names), "smfree-progress")


def _measures(item: pytest.Item) -> bool:
    return "measure" in getattr(item, "fixturenames", ())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report: pytest.TestReport = yield
    if _measures(item):
        ours = session_of(item.config)
        if report.skipped and isinstance(report.longrepr, tuple):
            ours.log.skips.append(_skip_record(ours, item, report.longrepr[2]))
        if report.failed and ours.pool.ranks is not None:
            ours.pool.failure = f"{item.nodeid} failed"
            item.session.shouldfail = "a rank that failed is out of step with the others, who end, too"
    return report


def _skip_record(ours: Session, item: pytest.Item, text: str) -> SkipRecord:
    spec = item.callspec.params.get("device", "") if hasattr(item, "callspec") else ""
    folder = ours.pool.identity(spec).folder if spec else ""
    return SkipRecord(item.nodeid, str(spec), folder, text.removeprefix("Skipped: "))


class ProgressHooks:
    """The progress line; registered only where there is a terminal to rewrite and points to measure."""

    def __init__(self, progress: Progress, names: dict[str, str]) -> None:
        self._progress = progress
        self._names = names

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if nodeid in self._names:
            self._progress.begin(self._names[nodeid])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if nodeid in self._names:
            self._progress.finish()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Points that are good or not possible here print no letter into the line."""
        if report.nodeid not in self._names or report.failed:
            return None
        counted = report.skipped or report.when == "call"
        return (report.outcome if counted else "", "", "SKIPPED" if report.skipped else "")


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    stable = stable_machine_info(machine_info)
    machine_info.clear()
    machine_info.update(stable)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(
    config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]
) -> None:
    del benchmarks
    ours = session_of(config)
    if ours.log.records or ours.log.skips:
        output_json["smfree"] = ours.log.json()


def pytest_report_header(config: pytest.Config) -> list[str]:
    ours = session_of(config)
    return [f"smfree device {line}" for line in ours.log.devices.values()]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Iterator[None]:
    """Last of all, and even when pytest-benchmark ends the run because of a regression."""
    try:
        yield
    finally:
        write_summary(session_of(config), terminalreporter)


def write_summary(ours: Session, terminalreporter: pytest.TerminalReporter) -> None:
    ours.progress.clear()
    if not ours.log.records and not ours.log.skips:
        return
    ours.log.files = ours.saving.files()
    ours.log.notes += ours.saving.notes
    sections = summary(ours.log)
    sections[-1:-1] = [("Against a saved run", text) for text in ours.saving.verdicts(ours.log.records)]
    terminalreporter.ensure_newline()
    for title, text in sections:
        terminalreporter.section(title)
        terminalreporter.write_line(text)


def pytest_unconfigure(config: pytest.Config) -> None:
    ours = config.stash.get(SESSION, None)
    if ours is not None:
        ours.close()


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An open device of the session. A test that kills an emulated one gives the next test a fresh one; a
    real GPU whose context died ends the session, because everything after it would fail for the same reason.
    """
    ours = session_of(request.config)
    spec = request.param
    opened = ours.open(spec)
    yield opened
    reason = ours.lost(spec, opened) or ours.pool.drop_dead_nodes(spec)
    if reason and not opened.is_emulated:
        pytest.exit(f"{spec} is unusable after {request.node.nodeid}: {reason}", returncode=3)


@pytest.fixture
def run_log(request: pytest.FixtureRequest) -> RunLog:
    """The records of this session so far."""
    return session_of(request.config).log


@pytest.fixture
def measure(request: pytest.FixtureRequest, device: Any, benchmark: Any) -> Measure:
    """Times and records points on ``device``; see smfree.measure.fixture.Measure."""
    ours = session_of(request.config)
    if ours.pool.ranks is not None:
        reason = ranks.reason_to_leave_out(request.node, ours.pool.ranks)
        if reason:
            pytest.skip(reason)
    spec = request.node.callspec.params["device"]
    params = dict(request.node.callspec.params)
    point = params.pop("point", None)
    benchmark.params = params | ({} if point is None else plain(dataclasses.asdict(point)))
    deterministic = device.clock_source == "modelled"
    return Measure(
        spec,
        ours.pool,
        ours.instruments(device),
        benchmark,
        ours.log,
        rounds=options.rounds(request.config, ours.given, deterministic=deterministic),
        versions=versions(device),
    )
