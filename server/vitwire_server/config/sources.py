"""Sources of settings: flags, environment variables, a TOML file.

`VITWIRE_` variables that are not settings are misspelt, or injected by Kubernetes for a Service named vitwire.
"""

import os
import re
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import ClassVar

from pydantic import ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

PREFIX = "VITWIRE_"
_INJECTED = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_INJECTED_URL = re.compile(r"(tcp|udp|sctp)://\S+:\d+")
_CLIENT = {"VITWIRE_TARGET", "VITWIRE_TOKEN"}
"""Read by the `vitwire` command, which may share its environment with a server."""


class SourcedSettings(BaseSettings):
    """A flag beats its environment variable, which beats the TOML file."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="forbid",
        env_ignore_empty=True,
        cli_prog_name="vitwire-server serve",
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        nested_model_default_partial_update=False,
    )
    toml: ClassVar[Path | None] = None
    """The TOML file to read; `resolving.resolve` sets it on a subclass."""

    @field_validator("*", mode="before")
    @classmethod
    def _booleans_are_not_numbers(cls, value: object, info: ValidationInfo) -> object:
        """Without this, pydantic reads `true` in TOML as 1."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("expected a number or a string, not a boolean")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment, then TOML. Called by pydantic-settings."""
        del dotenv_settings, file_secret_settings
        if isinstance(env_settings, EnvSettingsSource):
            given = env_settings.env_vars.items()
            env_settings.env_vars = {name: value for name, value in given if not (value and is_injected(name, value))}
        sources = (init_settings, env_settings)
        return (*sources, TomlConfigSettingsSource(settings_cls, cls.toml)) if cls.toml else sources


def is_injected(name: str, value: str) -> bool:
    """Whether Kubernetes (or a Docker link) set the variable to announce a Service."""
    return bool(_INJECTED.search(name.upper()) or (name.upper().endswith("_PORT") and _INJECTED_URL.fullmatch(value)))


def ignored_settings(fields: Collection[str]) -> list[str]:
    """A warning for each injected variable that is named like one of these settings."""
    return [
        f"{name}={value} is ignored: Kubernetes set it for a Service of that name; "
        "set enableServiceLinks: false in the pod's spec to avoid this"
        for name, value in sorted(os.environ.items())
        if name.upper() in _names(fields) and is_injected(name, value)
    ]


def unknown_variables(fields: Collection[str]) -> list[str]:
    """A message for each variable that is not a setting, with the setting probably meant."""
    known = _names(fields)
    return [
        f"{name} is not a setting{_meant(name.upper(), known)}"
        for name, value in sorted(os.environ.items())
        if value and name.upper().startswith(PREFIX) and name.upper() not in known | _CLIENT
        if not is_injected(name, value)
    ]


def _names(fields: Collection[str]) -> set[str]:
    return {f"{PREFIX}{name.upper()}" for name in ("config", *fields)}


def _meant(name: str, known: Collection[str]) -> str:
    close = get_close_matches(name.removeprefix(PREFIX), [each.removeprefix(PREFIX) for each in known], n=1, cutoff=0.7)
    return f"; did you mean {PREFIX}{close[0]}?" if close else ""
