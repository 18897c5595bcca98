// The functions that the runtime calls of a source without parameters. Included last: `Tensors`,
// `Integers`, `valid` and `launch` are the source's own.

#define TUNER_JOIN(a, b, c) a##b##c
#define TUNER_NAME(kernel, end) TUNER_JOIN(tuner_, kernel, end)

extern "C" int TUNER_NAME(TUNER_KERNEL, _workspace)(const int64_t* integers, int64_t* bytes) {
  *bytes = 0;
  return valid(view<Integers>(integers)) ? 0 : static_cast<int>(cudaErrorInvalidValue);
}

extern "C" int TUNER_NAME(TUNER_KERNEL, _launch)(void* const* tensors, const int64_t* integers, const double*, void*, void* stream) {
  return static_cast<int>(launch(view<Tensors>(tensors), view<Integers>(integers), static_cast<cudaStream_t>(stream)));
}
