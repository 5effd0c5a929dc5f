"""What the doctor says of installed packages."""

from __future__ import annotations

import importlib.metadata

import pytest

from novainfer.config import ServeConfig
from novainfer.entrypoints import doctor

pytestmark = pytest.mark.unit


def test_a_package_that_is_too_old_when_the_doctor_looks_then_it_fails_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = [
        "msgpack<2,>=1.2.3",
        "starlette>=1.3.1",
        "absent>=1; platform_system == 'Nowhere'",
        "openai>=2; extra == 'test'",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    versions = {"msgpack": "1.2.2", "starlette": "1.3.1+local"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    verdict = doctor.packages(ServeConfig())
    assert (verdict.status, verdict.finding) == (doctor.FAIL, "msgpack 1.2.2")
    assert verdict.fix == "pip install 'msgpack<2,>=1.2.3'"
    versions["msgpack"] = "1.2.10"
    assert doctor.packages(ServeConfig()).status == doctor.OK


def test_this_installation_when_the_doctor_looks_then_every_package_is_new_enough() -> None:
    assert doctor.packages(ServeConfig()).status == doctor.OK


def test_a_checkout_that_is_not_installed_when_the_doctor_looks_then_it_only_warns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert doctor.packages(ServeConfig()).status == doctor.WARN
