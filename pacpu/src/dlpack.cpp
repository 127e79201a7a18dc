#include "dlpack.h"

namespace py = pybind11;

namespace pacpu {
namespace {

// The ABI of DLPack 1.x.
struct DLDevice {
    int32_t device_type, device_id;
};
struct DLDataType {
    uint8_t code, bits;
    uint16_t lanes;
};
struct DLTensor {
    void* data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};
struct DLManagedTensor {
    DLTensor dl_tensor;
    void* manager_ctx;
    void (*deleter)(DLManagedTensor*);
};
struct DLPackVersion {
    uint32_t major, minor;
};
struct DLManagedTensorVersioned {
    DLPackVersion version;
    void* manager_ctx;
    void (*deleter)(DLManagedTensorVersioned*);
    uint64_t flags;
    DLTensor dl_tensor;
};
// The table behind a type's __dlpack_c_exchange_api__ (DLPack 1.3), which spares us the calls through Python.
struct DLPackExchangeAPI {
    DLPackVersion version;
    const DLPackExchangeAPI* prev_api;
    void* managed_tensor_allocator;
    int (*managed_tensor_from_py_object_no_sync)(void* object, DLManagedTensorVersioned** out);
};
constexpr uint64_t read_only_flag = 1;
constexpr int32_t device_cpu = 1, device_cuda_host = 3, device_rocm_host = 11;  // the latter two: pinned memory

Array view(const char* name, const DLTensor& tensor, bool is_read_only, py::object owner) {
    const int32_t device = tensor.device.device_type;
    if (device != device_cpu && device != device_cuda_host && device != device_rocm_host)
        throw py::value_error(std::string(name) + " must be in host memory, but is on a device of DLPack type " +
                              std::to_string(device) + "; move it to the CPU");
    Array array{name,         static_cast<char*>(tensor.data) + tensor.byte_offset,
                tensor.dtype.code, tensor.dtype.bits * tensor.dtype.lanes,
                is_read_only, std::vector<int64_t>(tensor.shape, tensor.shape + tensor.ndim),
                {},           std::move(owner)};
    if (tensor.strides) {
        array.strides.assign(tensor.strides, tensor.strides + tensor.ndim);
    } else {
        array.strides.assign(tensor.ndim, 1);
        for (int i = tensor.ndim - 1; i > 0; --i) array.strides[i - 1] = array.strides[i] * array.shape[i];
    }
    return array;
}

Array view(const char* name, const DLManagedTensorVersioned& managed, py::object owner) {
    if (managed.version.major != 1)
        throw py::value_error(std::string(name) + " speaks DLPack " + std::to_string(managed.version.major) +
                              "; only version 1 is understood");
    return view(name, managed.dl_tensor, managed.flags & read_only_flag, std::move(owner));
}

const DLPackExchangeAPI* exchange_api(py::handle type) {
    py::object capsule = py::getattr(type, "__dlpack_c_exchange_api__", py::none());
    if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
    auto* api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    while (api && api->version.major != 1) api = api->prev_api;
    return api;
}

Array read_through_api(const char* name, py::handle object, const DLPackExchangeAPI& api) {
    DLManagedTensorVersioned* managed = nullptr;
    if (api.managed_tensor_from_py_object_no_sync(object.ptr(), &managed) != 0) throw py::error_already_set();
    py::capsule owner(managed, [](void* p) {
        auto* managed = static_cast<DLManagedTensorVersioned*>(p);
        if (managed->deleter) managed->deleter(managed);
    });
    return view(name, *managed, std::move(owner));
}

// The capsule frees the tensor when it goes, since we never mark it as consumed.
Array read_through_capsule(const char* name, py::handle object) {
    py::object capsule;
    try {
        capsule = object.attr("__dlpack__")();
    } catch (py::error_already_set& error) {
        if (!error.matches(PyExc_BufferError)) throw;
        // Before version 1 the protocol had no way to say that an array is read-only, so numpy refuses.
        capsule = object.attr("__dlpack__")(py::arg("max_version") = py::make_tuple(1, 0));
    }
    if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
        const auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
        return view(name, managed->dl_tensor, false, capsule);
    }
    const auto* managed = PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned");
    if (!managed) throw py::error_already_set();
    return view(name, *static_cast<const DLManagedTensorVersioned*>(managed), capsule);
}

}  // namespace

std::string Array::dtype_name() const {
    constexpr const char* kinds[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
    return (type_code < 7 ? std::string(kinds[type_code]) : "type" + std::to_string(type_code) + "_") + std::to_string(type_bits);
}

Array read_array(const char* name, py::handle object) {
    try {
        const py::type type = py::type::of(object);
        if (const auto* api = exchange_api(type)) return read_through_api(name, object, *api);
        if (py::hasattr(object, "__dlpack__")) return read_through_capsule(name, object);
    } catch (py::error_already_set& error) {
        throw py::value_error(std::string(name) + " cannot be read through DLPack: " + error.what());
    }
    throw py::value_error(std::string(name) + " must be an array that supports DLPack, not " +
                          py::repr(py::type::of(object)).cast<std::string>());
}

}  // namespace pacpu
