"""Interpolation: nested grids, scattered GEMM sites, and the utilisation-space model. Everything takes point arrays."""
