"""The embedded lab: four ranks as containers on this machine."""
