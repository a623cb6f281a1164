"""The compiled programs: their entry points, their lowering, and the layout of uploads."""
