"""Planner questions over forward-pass times: capacity, queue drain, ITL; learning from observed iterations."""
