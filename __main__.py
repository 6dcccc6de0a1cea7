"""The Pulumi program: configuration, facts, plan, components, export; what each means stands in its own module."""

from components.program import run

run()
