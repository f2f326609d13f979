"""Texts: reading them, turning them into token windows."""
