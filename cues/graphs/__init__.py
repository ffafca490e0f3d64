"""Declarations of users, and the plan that engines run."""
