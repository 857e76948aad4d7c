"""`vitwire router` and `vitwire sglang-encoder`. `vitwire_cli.main` names the extra of a package that is missing."""

from vitwire_cli.connection import reported, warn
from vitwire_flags.options import options_of, with_options
from vitwire_flags.variables import ignored_variables
from vitwire_gateway.gateway_settings import RouterSettings, SglangSettings


@reported(RouterSettings.prefix)
@with_options
def router(settings: RouterSettings) -> None:
    """Serve OpenAI's API in front of vLLM: images of chat requests are encoded by Vitwire.

    Every flag is also an environment variable: --engine-url is VITWIRE_ROUTER_ENGINE_URL.
    """
    for warning in ignored_variables(settings.prefix, options_of(RouterSettings)):
        warn(warning)
    from vitwire_gateway.router.router_process import serve  # noqa: PLC0415  # of the extra [router]

    serve(settings)


@reported()
@with_options
def sglang_encoder(settings: SglangSettings) -> None:
    """Serve SGLang's encoder protocol: a --language-only SGLang uses Vitwire as its --encoder-urls."""
    from vitwire_gateway.sglang.encoder_process import serve  # noqa: PLC0415  # of the extra [sglang]

    serve(settings)
