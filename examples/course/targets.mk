# `make course`: builds and checks the exercises of examples/course; included by the Makefile.
#   N=3             one exercise
#   SOLUTIONS=1     the solutions instead of exercise.h
#   BODY=FILE       with N: another file instead of exercise.h
#   JSON=1          a line of JSON for each exercise
exercises := $(sort $(notdir $(patsubst %/check.cpp,%,$(wildcard examples/course/$(N)*/check.cpp))))
BODY      ?= examples/course/%/$(if $(SOLUTIONS),solution,exercise).h
checked   := $(exercises:%=$(BUILD)/course/%-$(notdir $(basename $(BODY))))
shared    := $(OBJ)/examples/course/check.o $(OBJ)/examples/course/processes$(if $(UCX_ON),,_none).o

course:
	+@$(MAKE) --no-print-directory --keep-going course-programs || true
	@sh examples/course/run.sh $(if $(JSON),--json) $(checked)
course-programs: $(checked)
# The standard library's headers, parsed once with the flags of the exercises: an index out of range ends the program.
course_flags := -O0 -D_GLIBCXX_ASSERTIONS
course_std   := $(parsed:$(BUILD)/%=$(BUILD)/course/%)
$(BUILD)/course/std.h.gch $(BUILD)/course/std.h.pch: $(BUILD)/std.h $(BUILD)/compile.flags
	@mkdir -p $(@D) && cp $< $(@D)/
	$(call say,$(CXX) $<)$(CXX) $(strip $(FLAGS) $(CPPFLAGS) $(CXXFLAGS)) $(course_flags) -x c++-header $< -o $@
# $(BUILD)/course/3_ring-exercise: the check of 3_ring with exercise.h. A failed compilation leaves no program.
define course_program
$(BUILD)/course/$1-$(notdir $(basename $(BODY))): examples/course/$1/check.cpp $(subst %,$1,$(BODY)) $(shared) $(BUILD)/libtandem.a | $(course_std)
	@rm -f $$@ && mkdir -p $$(@D)
	$$(call say,$(CXX) $$<)$$(filter-out -Werror,$$(compile:$(BUILD)/std.h=$$(basename $(course_std)))) $(course_flags) -Wno-unused-parameter -DBODY='"$(subst %,$1,$(BODY))"' -MMD -MP -MF $$@.d -c $$< -o $$@.o
	$$(call say,link $$@)$$(CXX) $$(strip $$(FLAGS) $$(CXXFLAGS) $$(LDFLAGS)) $$@.o $$(filter %.o %.a,$$^) $$(strip $$(LIBS) $$(LDLIBS)) -o $$@
-include $(shared:.o=.d) $(BUILD)/course/$1-$(notdir $(basename $(BODY))).d
endef
$(foreach e,$(exercises),$(eval $(call course_program,$e)))
