"""Bookings and handled messages in the admin."""

from django.contrib import admin

from .models import Booking, ReceivedMessage


@admin.register(Booking)
class BookingAdmin(admin.ModelAdmin):
    list_display = ["order", "total", "booked_at"]
    search_fields = ["order"]


@admin.register(ReceivedMessage)
class ReceivedMessageAdmin(admin.ModelAdmin):
    list_display = ["message_id", "sender", "times", "first_at"]
    search_fields = ["message_id"]
