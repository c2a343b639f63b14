"""A GPU in numbers: what the driver answers about it, and what the clock charges for.

A profile is a TOML file in ``profiles/``. Every parameter there is a table ``{ value, unit, source }``; the
source names a public document or a row of public measurements, or starts with ``assumed``. Nothing here is
measured by this project, and a time computed from it is *modelled*.

``python -m smfree.emulator.replay h100`` prints the parameters and the error on the rows that did not fix
them.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from smfree.emulator.specs import (
    ClusterSpec,
    DeviceSpec,
    DramSpec,
    EngineSpec,
    HostSpec,
    IssueSpec,
    L2Spec,
    LinkSpec,
    SharedSpec,
    SyncSpec,
    TmaSpec,
)


class Parameter(NamedTuple):
    """One row of :meth:`Profile.parameters`."""

    path: str
    value: float
    unit: str
    source: str


class PublishedRow(NamedTuple):
    """A public measurement that tests the profile: it fixed no parameter of it."""

    id: str
    variant: str
    kind: str
    args: Mapping[str, float]
    value: float
    unit: str
    source: str


_SECTIONS: dict[str, type] = {
    "device": DeviceSpec,
    "issue": IssueSpec,
    "shared": SharedSpec,
    "l2": L2Spec,
    "dram": DramSpec,
    "lsu": EngineSpec,
    "cp_async": EngineSpec,
    "tma": TmaSpec,
    "cluster": ClusterSpec,
    "sync": SyncSpec,
    "link": LinkSpec,
    "host": HostSpec,
}
_OPTIONAL = frozenset({"tma", "cluster"})


@dataclass(frozen=True)
class Profile:
    """One emulated GPU. ``tma`` and ``cluster`` are None where the GPU has none.

    ``notes`` maps ``"section.field"`` to ``(unit, source)``. ``variants`` are named sets of values for
    related boards on which public rows were measured; ``tests`` are the rows the model is checked against.
    """

    key: str
    device: DeviceSpec
    issue: IssueSpec
    shared: SharedSpec
    l2: L2Spec
    dram: DramSpec
    lsu: EngineSpec
    cp_async: EngineSpec
    tma: TmaSpec | None
    cluster: ClusterSpec | None
    sync: SyncSpec
    link: LinkSpec
    host: HostSpec
    notes: Mapping[str, tuple[str, str]] = field(repr=False)
    variants: Mapping[str, Mapping[str, float]] = field(default_factory=dict, repr=False)
    fixed_by: tuple[str, ...] = ()
    tests: tuple[PublishedRow, ...] = ()

    @property
    def has_tma(self) -> bool:
        return self.tma is not None

    def parameters(self, *, clock_only: bool = False) -> Iterator[Parameter]:
        """Yield every numeric parameter with its unit and source; ``clock_only`` leaves out ``device``.

        The SM clock and the DRAM clock are yielded in any case: the clock depends on them.
        """
        for path, (unit, source) in self.notes.items():
            section, name = path.split(".")
            if clock_only and section == "device" and name not in ("sm_clock_mhz", "memory_clock_mhz"):
                continue
            value = self.get(path)
            if not isinstance(value, str):
                yield Parameter(path, float(value), unit, source)

    def get(self, path: str) -> Any:
        """The value at ``"section.field"``. Raises KeyError when there is no such parameter."""
        section, _, name = path.partition(".")
        if path not in self.notes:
            raise KeyError(f"no parameter {path!r} in profile {self.key}; parameters() lists them")
        return getattr(getattr(self, section), name)

    def replace(self, path: str, value: float | None = None, *, factor: float | None = None) -> Profile:
        """A copy with one parameter set to ``value`` or multiplied by ``factor`` (sensitivity).

        Whole-number parameters are rounded. Raises KeyError for an unknown path, ValueError unless exactly
        one of ``value`` and ``factor`` is given or when the parameter is no number.
        """
        if (value is None) == (factor is None):
            raise ValueError(f"replace({path!r}): give either value or factor, not both or none")
        old = self.get(path)
        if isinstance(old, str):
            raise ValueError(f"replace({path!r}): the parameter is a text, not a number")
        new: Any = value if factor is None else old * factor
        section, _, name = path.partition(".")
        new = type(old)(round(new)) if isinstance(old, int) else float(new)
        part = dataclasses.replace(getattr(self, section), **{name: new})
        return dataclasses.replace(self, **{section: part})

    def variant(self, name: str) -> Profile:
        """The profile of a related board (see ``variants``); the empty name is the profile itself."""
        if not name:
            return self
        if name not in self.variants:
            raise KeyError(f"profile {self.key} has no variant {name!r}; it has {sorted(self.variants)}")
        profile = self
        for path, value in self.variants[name].items():
            profile = profile.replace(path, value)
        return dataclasses.replace(profile, key=f"{self.key}/{name}")


def names() -> list[str]:
    """The profiles that come with the package."""
    folder = resources.files("smfree.emulator") / "profiles"
    return sorted(item.name[:-5] for item in folder.iterdir() if item.name.endswith(".toml"))


def load(name: str | Path) -> Profile:
    """Load a profile by name (``"h100"``) or from a TOML file.

    Raises FileNotFoundError for an unknown name and ValueError for a file with a missing, unknown or
    unsourced parameter.
    """
    path = Path(name)
    if path.suffix == ".toml":
        text, key = path.read_text(encoding="utf-8"), path.stem
    else:
        key = str(name)
        if key not in names():
            raise FileNotFoundError(
                f"no profile {key!r}; there are {', '.join(names())}, or give a .toml file"
            )
        text = _text(key)
    return parse(text, key)


def _text(key: str) -> str:
    return (resources.files("smfree.emulator") / "profiles" / f"{key}.toml").read_text(encoding="utf-8")


def _extended(data: dict[str, Any]) -> dict[str, Any]:
    """A file that ``extends`` a profile of the package has that one's parameters where it gives none, and the
    rows that fixed them; the rows that test it are its own."""
    base = data.pop("extends", None)
    if base is None:
        return data
    whole = tomllib.loads(_text(base))
    fixed_by = whole.pop("published").get("fixed_by", [])
    whole.pop("variant", None)
    for section, table in data.items():
        whole[section] = {**whole[section], **table} if section in whole else table
    own = whole.setdefault("published", {})
    own["fixed_by"] = [*fixed_by, *own.get("fixed_by", [])]
    return whole


def parse(text: str, key: str) -> Profile:
    """Build a profile from TOML text. Raises ValueError naming the parameter that is wrong."""
    data = _extended(tomllib.loads(text))
    parts: dict[str, Any] = {}
    notes: dict[str, tuple[str, str]] = {}
    for section, spec in _SECTIONS.items():
        table = data.pop(section, None)
        if table is None:
            if section not in _OPTIONAL:
                raise ValueError(f"profile {key}: section [{section}] is missing")
            parts[section] = None
            continue
        parts[section] = _section(key, section, spec, table, notes)
    variants = {str(name): dict(values) for name, values in data.pop("variant", {}).items()}
    published = data.pop("published", {})
    if data:
        raise ValueError(f"profile {key}: unknown sections {sorted(data)}; known are {sorted(_SECTIONS)}")
    tests = tuple(
        PublishedRow(
            row["id"],
            row.get("variant", ""),
            row["kind"],
            dict(row.get("args", {})),
            float(row["value"]),
            row["unit"],
            row["source"],
        )
        for row in published.get("test", ())
    )
    return Profile(
        key=key,
        notes=notes,
        variants=variants,
        fixed_by=tuple(published.get("fixed_by", ())),
        tests=tests,
        **parts,
    )


def _section(
    key: str, section: str, spec: type, table: Mapping[str, Any], notes: dict[str, tuple[str, str]]
) -> Any:
    """One dataclass of the profile from its TOML table; fills ``notes``."""
    hints = get_type_hints(spec)
    fields = {item.name: hints[item.name] for item in dataclasses.fields(spec)}
    missing, unknown = fields.keys() - table.keys(), table.keys() - fields.keys()
    if missing or unknown:
        raise ValueError(f"profile {key}: [{section}] lacks {sorted(missing)}, has unknown {sorted(unknown)}")
    values: dict[str, Any] = {}
    for name, kind in fields.items():
        entry = table[name]
        if not isinstance(entry, Mapping) or not {"value", "unit", "source"} == entry.keys():
            raise ValueError(
                f"profile {key}: {section}.{name} must be {{ value, unit, source }}, got {entry!r}"
            )
        if not entry["source"].strip() or not entry["unit"].strip():
            raise ValueError(
                f"profile {key}: {section}.{name} has no unit or no source; write 'assumed: why'"
            )
        value = entry["value"]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind):
            raise ValueError(f"profile {key}: {section}.{name} must be a {kind.__name__}, got {value!r}")
        if not isinstance(value, str) and value < 0:
            raise ValueError(f"profile {key}: {section}.{name} must not be negative, got {value!r}")
        values[name] = value
        notes[f"{section}.{name}"] = (entry["unit"], entry["source"])
    return spec(**values)
