"""The shop's door, the warehouse's door, and the admin."""

from django.contrib import admin
from django.urls import path

from shop.views import orders
from warehouse.views import receive_order

urlpatterns = [
    path("shop/orders/", orders, name="shop-orders"),
    path("warehouse/orders/", receive_order, name="warehouse-orders"),
    path("admin/", admin.site.urls),
]
