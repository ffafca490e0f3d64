/* Delivery: one batch function with side effects, one owner after another, a death at any point.

   The step is that of docs/guarantees.md: take, snapshot, run, commit. The target of the function ignores a hash that
   it has had. Messages arrive at any time, so a second try could take more of them than the first.

   Each line that an action prints is a point of cues/faults.py, for the owner A, B, C or the last one, Z.

   exactly_once   each message is on the output queue once
   one_hash       a message is given to the function under one hash, on every try
*/
#define MESSAGES 3
#define BATCH 2
#define DEATHS 2

mtype = { exactly_once, one_hash }
#define MUST(property, holds) if :: (holds) :: else -> printf("FAILS %e\n", property); assert(false) fi
#define HASH(from, to) ((from) * 8 + (to))      /* steps/hashes.py: the hash of a range */

byte arrived;                     /* the messages on the input queue; the first is 0 */
/* The store. */
byte position;                    /* the row of the processor */
bool has_snapshot; byte snap_from, snap_to; bool has_attempt;     /* the try log */
byte outputs[MESSAGES];           /* how often each message is on the output queue */
/* The target. */
byte given_under[MESSAGES];       /* the hash under which a message was given */

byte started, deaths;
bool alive;

inline may_die() {
  if
  :: deaths < DEATHS && who != 'Z' -> deaths++; alive = false; printf("%c killed\n", who); goto dead
  :: true
  fi
}

/* Another program appends (queues/queue.py). */
proctype feeder() {
  do
  :: atomic { arrived < MESSAGES -> arrived++; printf("feed\n") }
  :: arrived == MESSAGES -> break
  od
}

proctype owner(byte who) {
  byte from, to, i; bool again;

  /* Ownership.claim, and Recovery.decide: the start table. */
  atomic {
    !alive && (who == 'A' + started || who == 'Z') -> alive = true; started++;
    again = has_snapshot && !has_attempt && snap_from == position;
#ifdef NO_REWIND
    again = false;
#endif
    printf("%c claim.after\n", who)
  }
  do
  :: position == MESSAGES -> break
  :: atomic { position < arrived ->
      /* 1. Taker.take */
      from = position;
      to = (arrived < from + BATCH -> arrived : from + BATCH);
      if :: again -> to = snap_to; again = false :: else fi;
      printf("%c take.after\n", who); may_die()
     };
#ifndef NO_SNAPSHOT
     /* 2. Committer.commit_snapshot */
     atomic {
      has_snapshot = true; has_attempt = false; snap_from = from; snap_to = to;
#ifdef POSITION_FIRST
      position = to;
#endif
      printf("%c snapshot.after\n", who); may_die()
     };
#endif
     /* 3. Runner */
     atomic {
      for (i : from .. to - 1) {
        if
        :: given_under[i] == 0 -> given_under[i] = HASH(from, to)
        :: else -> MUST(one_hash, given_under[i] == HASH(from, to))
        fi
      };
      i = 0;
      printf("%c function.after\n", who); may_die()
     };
     /* 4. Committer.write_step */
#ifdef TWO_COMMITS
     atomic {
      for (i : from .. to - 1) { outputs[i]++ };
      i = 0;
      printf("%c commit.after\n", who); may_die()
     };
     atomic { has_attempt = true; position = to };
#else
     atomic {
      for (i : from .. to - 1) { outputs[i]++ };
      i = 0;
      has_attempt = true; position = to;
      printf("%c commit.after\n", who); may_die()
     }
#endif
  od;
  alive = false;
dead: skip
}

init {
  byte i;
  atomic { run feeder(); run owner('A'); run owner('B'); run owner('C') };
  _nr_pr == 1;
  run owner('Z');
  _nr_pr == 1;
  for (i : 0 .. MESSAGES - 1) { MUST(exactly_once, outputs[i] == 1) }
}
