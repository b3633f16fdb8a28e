"""Profile `reference`: the reference generator's request, rule sets, files and known faults. Specification 08, 2-7.

Only goldens and comparisons use it. It ends in the same ``Plan`` and the same targets as a ``Deployment``.
"""

from perfcast_deploy.reference.files import render
from perfcast_deploy.reference.plan import plan_of
from perfcast_deploy.reference.request import Request, load

__all__ = ["Request", "load", "plan_of", "render"]
