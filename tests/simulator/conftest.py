from testbed.simulator.fixtures import simulate, simulator

__all__ = ["simulate", "simulator"]
