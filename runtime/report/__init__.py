"""Forecasts and measured timelines for people: an HTML page, a Chrome trace, figures."""
