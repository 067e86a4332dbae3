"""Orders in the admin."""

from django.contrib import admin

from .models import Order


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ["number", "total", "placed_at"]
    search_fields = ["number"]
