"""Where settings come from: flags, environment variables, a TOML file."""

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

from vitwire_server.config.variables import PREFIX, without_injected


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
            env_settings.env_vars = without_injected(env_settings.env_vars)
        sources = (init_settings, env_settings)
        return (*sources, TomlConfigSettingsSource(settings_cls, cls.toml)) if cls.toml else sources
