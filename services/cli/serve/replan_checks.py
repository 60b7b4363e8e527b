"""Whether the settings of the replanner make sense. Checked at every start, so the replanner is not imported here."""

from __future__ import annotations

from diptych.config.load import LoadedConfig
from diptych.errors import ConfigError
from diptych.slo import read_slo
from planner.costs.profile_file import load_profile
from services.cli.serve.specs import devices_by_worker


def check_replan_settings(loaded: LoadedConfig) -> None:
    """Raises ConfigError if a setting of the replanner is given without --replan, or if the replanner cannot use it."""
    config, origins = loaded.config, loaded.origins
    idle = [name for name in origins if name.startswith("replan_")]
    if idle and not config.replan:
        raise ConfigError(
            f"{origins[idle[0]]} has no effect", "nothing is replanned", "add --replan, or leave it out"
        )
    if not config.replan:
        return
    if not read_slo(config.slo_ttft_ms, config.slo_tpot_ms).has_limits:
        raise ConfigError(
            "there is nothing to plan for",
            "the replanner controls SLO attainment, and no SLO is given",
            "--slo-ttft-ms MS and --slo-tpot-ms MS, or a --plan that has them",
        )
    held = sum(devices_by_worker(config).values())
    if config.replan_budget is not None and config.replan_budget < held:
        raise ConfigError(
            f"a budget of {config.replan_budget} devices is less than the deployment begins with",
            f"its workers hold {held} (budget from {loaded.origin_of('replan_budget')})",
            f"--replan-budget {held} or more, or fewer workers",
        )
    if config.replan_interval_s * 4 > config.replan_window_s:
        raise ConfigError(
            f"a window of {config.replan_window_s:g} s is too short to see changes in",
            f"traffic is asked for every {config.replan_interval_s:g} s, and a window needs four of them at least",
            "--replan-window-s 300",
        )
    if config.replan_profile is not None:
        load_profile(config.replan_profile)
