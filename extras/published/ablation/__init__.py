"""Switches rules of forecasts off, one by one."""
