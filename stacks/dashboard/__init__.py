"""Dashboard: graphs, alarms and the log of stopped tasks."""
