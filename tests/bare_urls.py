"""The URLs of a project that has none."""

urlpatterns: list[object] = []
