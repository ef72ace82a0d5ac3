# SPDX-License-Identifier: Apache-2.0
"""Reread flags, environment and file on SIGHUP; uvicorn_server.py calls it, the router app changes."""

from __future__ import annotations

import logging
from typing import Final

import click

from ttft_otel.commands.router import router_options
from ttft_otel.commands.router.router_options import RouterOptions
from ttft_otel.router.control import app as control

log: Final = logging.getLogger("ttft_otel")


class ConfigReloader:
    """Handles SIGHUP: apply new instances and API keys, or log why the configuration is invalid."""

    def __init__(
        self, ctx: click.Context, current_options: RouterOptions, app: control.RouterApp
    ) -> None:
        self.ctx, self.current_options, self.app = ctx, current_options, app

    def __call__(self) -> None:
        """Reload the configuration; runs on the event loop and takes milliseconds."""
        try:
            # All is checked before anything is applied: a wrong file leaves the router as it is.
            new_options = router_options.reread_options(self.ctx)
            self._apply_options(new_options)
        except click.ClickException as error:
            # Whoever sent the signal gets no answer: the counter and the log line are all there is.
            self.app.metrics.reloads["failed"] += 1
            log.error(
                "ttft-otel: configuration reload failed, keeping the current one: %s",
                error.format_message(),
            )

    def _apply_options(self, new_options: RouterOptions) -> None:
        upstream = self.app.endpoint.upstream
        instances_by_leg = new_options.build_instances()
        found = self.app.found
        # Those that sources name stay.
        if found is not None:
            try:
                added, removed = found.set_configured(instances_by_leg)
            except ValueError as error:
                raise click.UsageError(str(error)) from error
        # Only within the same legs: which flow serves a request depends on the legs there are.
        elif set(instances_by_leg) == set(upstream.pool.list_legs()):
            added, removed = upstream.pool.replace_instances(instances_by_leg)
        else:
            before, after = ", ".join(upstream.pool.list_legs()), ", ".join(instances_by_leg)
            raise click.UsageError(
                f"it would change the legs from {before} to {after}; restart the router for that"
            )
        # After the instances, which may be refused: then the old keys stay valid, too.
        self.app.admission.set_client_keys(new_options.api_key)
        self.app.metrics.reloads["ok"] += 1
        log.warning(
            "ttft-otel: configuration reloaded: added %s; removed %s",
            ", ".join(added) or "nothing",
            ", ".join(removed) or "nothing",
        )
        # Compared with the options of the start, which are still
        # in force: every reload repeats this.
        if needs_restart := router_options.list_fixed_changes(self.current_options, new_options):
            log.warning(
                "ttft-otel: configuration reload: restart the router to apply the new %s",
                ", ".join(needs_restart),
            )
