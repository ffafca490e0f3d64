"""Engines, which run a plan. ``local`` runs it in threads of one process."""
