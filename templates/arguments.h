// A launch's arguments by name: `arguments.cu.j2` makes the structs, from the family's declaration.
#pragma once

namespace tuner {

// An array of arguments as a struct that has nothing else.
template <class View, class Argument>
View const& view(Argument const* arguments) {
  static_assert(sizeof(View) % sizeof(Argument) == 0 && alignof(View) == alignof(Argument), "arguments alone");
  return *reinterpret_cast<View const*>(arguments);
}

}  // namespace tuner
