/* Ownership: a processor with a state, a process A that is stopped at any point, a process B that takes over, and a
   seek by an operator. The function counts its messages in the state.

   Each line that an action prints is a point of cues/faults.py, for the process A, B or the last one, Z. "refused" is
   a commit that raises Fenced.

   exactly_once   after the last seek, each message from its place on is on the output queue once more
   state          the state counts the messages since the seek that reset it
*/
#define MESSAGES 2

mtype = { exactly_once, state_of_now }
#define MUST(property, holds) if :: (holds) :: else -> printf("FAILS %e\n", property); assert(false) fi

/* The store. */
byte owner, epoch, position;      /* the row of the processor, which is the fence */
byte state;
byte outputs[MESSAGES];           /* how often each message is on the output queue since the seek */
byte counts_from;                 /* the place of the seek: the state counts from there */

byte started;                     /* the processes: A is the first one */

proctype process(byte who) {
  byte my_epoch, my_position, my_state; bool passes;

  /* Ownership.claim: the epoch is raised. (A start while A runs waits for the end of A's lease: A is stopped.) */
  atomic {
    who == 'A' + started || who == 'Z' -> started++;
    owner = who; epoch++;
    my_epoch = epoch; my_position = position; my_state = state;
    printf("%c claim.after\n", who)
  }
  do
  :: my_position == MESSAGES -> break
  :: my_position < MESSAGES ->
     atomic { printf("%c take.after\n", who) };                   /* 1. Taker.take */
     atomic { printf("%c function.after\n", who) };               /* 3. Runner: my_state + 1 is in memory */
#ifdef CHECK_BEFORE
     /* The comparison in a transaction of its own. */
     atomic { passes = (owner == who && epoch == my_epoch && position == my_position); printf("%c commit.before\n", who) };
#endif
     /* 4. Committer.write_step, with Fence.check */
     atomic {
#ifndef CHECK_BEFORE
       passes = (owner == who && epoch == my_epoch && position == my_position);
#endif
#ifdef NO_FENCE
       passes = true;
#endif
#ifdef ONLY_OWNER
       passes = (owner == who);
#endif
       if
       :: passes ->
          outputs[my_position]++; state = my_state + 1; my_state = state;
          my_position++; position = my_position;
          printf("%c commit.after\n", who)
       :: !passes && owner == who ->                              /* fenced() with reason "seek": Stepper.adopt */
          printf("%c dropped\n", who);
          my_epoch = epoch; my_position = position; my_state = state
       :: else -> printf("%c refused\n", who); goto done          /* reason "takeover" */
       fi;
       passes = false
     }
  od;
done: skip
}

/* ownership.seek with reset_state, to a place that has been reached, also the present one. */
proctype operator() {
#ifndef NO_SEEK
  byte place, i;
  if
  :: atomic { position > 0 ->
       select (place : 0 .. position);
#ifndef SEEK_KEEPS_EPOCH
       epoch++;
#endif
       position = place; counts_from = place; state = 0;
       for (i : place .. MESSAGES - 1) { outputs[i] = 0 };
       i = 0;
       printf("seek %d\n", place)
     }
  :: true
  fi
#else
  skip
#endif
}

init {
  byte i;
  atomic { run process('A'); run process('B'); run operator() };
  _nr_pr == 1;
  run process('Z');
  _nr_pr == 1;
  for (i : 0 .. MESSAGES - 1) { MUST(exactly_once, outputs[i] == 1) }
  MUST(state_of_now, state == MESSAGES - counts_from)
}
