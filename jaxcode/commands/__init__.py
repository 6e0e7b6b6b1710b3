"""The commands of theory: describe, plan, simulate and plot."""
