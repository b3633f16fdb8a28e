"""What stands on forward passes: serving models, the search for deployments, the planner's questions. Pure numpy."""
