"""Engines: what runs a plan. ``local`` runs it in threads of one process."""
