/* Forwarding: the steps of a fork queue of the home store go to another store. Two forwarders, in two processes. Both
   stores are "process" stores: a power cut takes back all commits since the last sync of one of them, and ends all
   processes. A step that is lost runs again, and may then have other messages.

   The numbers are those of forwarding/forwarder.py. Each line that an action prints is a point of cues/faults.py, for
   the process A or B.

   exactly_once   each step is in the other store once, with the messages that it has in the home store
   continues      no start finds that the two stores have different histories (Diverged)
*/
#define STEPS 2
#ifndef CUTS
#define CUTS 1
#endif

mtype = { exactly_once, continues }
#define MUST(property, holds) if :: (holds) :: else -> printf("FAILS %e\n", property); assert(false) fi

/* The home store: the fork queue. Steps are counted from 1. */
byte steps, steps_synced, first = 1;
byte messages[STEPS + 1];         /* of a step: another number after each run of its function */
byte runs;
/* The other store: the producer row, and the copies of each step. */
byte row, row_synced;
byte copies[STEPS + 1], copied[STEPS + 1];

byte boot, cuts, started;         /* a process of an earlier boot is gone */

/* Committer.write_step: a step of the graph. */
proctype graph() {
  do
  :: atomic { steps < STEPS -> steps++; runs++; messages[steps] = runs; printf("step\n") }
  :: atomic { row == STEPS && cuts == CUTS -> break }
  od
}

proctype forwarder(byte me) {
  byte my_boot, my_row, upto, i; byte read[STEPS + 1];

start:
  /* Forwarder.compare, at a start */
  atomic {
    me == 0 || started > 0 -> started++;
    my_boot = boot;
    MUST(continues, row <= steps && row + 1 >= first && (row == 0 || messages[row] == copied[row]));
    printf("%c claim.after\n", 'A' + me)
  }
  do
  :: atomic { my_boot != boot -> goto start }
  :: atomic { row == STEPS && cuts == CUTS -> break }
  :: atomic { my_boot == boot && row < steps ->
       my_row = row; upto = steps;                                /* 1 and 2: the row, the steps after it */
       for (i : 1 .. STEPS) { read[i] = (i > my_row && i <= upto -> messages[i] : 0) };
       i = 0;
       printf("%c forward.read\n", 'A' + me)
     };
     atomic {
       if :: my_boot != boot -> goto start :: else fi;
#ifndef NO_SYNC_HOME
       steps_synced = steps;                                      /* 3: BaseStore.sync */
#endif
       printf("%c forward.synced\n", 'A' + me)
     };
     atomic {                                                     /* 4: Forwarder.append_steps */
       if :: my_boot != boot -> goto start :: else fi;
       if
#ifdef NO_ROW
       :: true ->
#else
       :: row == my_row ->
#endif
          for (i : my_row + 1 .. upto) { copies[i]++; copied[i] = read[i] };
          i = 0;
#ifndef ROW_LATER
          row = upto;
#endif
          printf("%c forward.after\n", 'A' + me)
       :: else -> printf("%c overtaken\n", 'A' + me)
       fi
     };
#ifdef ROW_LATER
     atomic { if :: my_boot != boot -> goto start :: else fi; row = upto };
#endif
     if
     :: atomic { my_boot == boot && row >= first ->               /* 6: Forwarder.trim */
#ifndef NO_SYNC_OTHER
          row_synced = row;
#endif
          first = row; printf("%c trim.inside\n", 'A' + me) }
     :: true
     fi
  od
}

/* A power cut. Only "process" stores lose commits. */
proctype power() {
  byte i;
  do
  :: cuts == CUTS -> break
  :: atomic { cuts < CUTS ->
       cuts++; boot++;
       if
       :: steps = (steps < steps_synced -> steps : steps_synced); printf("cut home\n")
       :: for (i : row_synced + 1 .. STEPS) { copies[i] = 0; copied[i] = 0 };
          row = row_synced; printf("cut away\n")
       fi
     }
  :: atomic { cuts < CUTS -> cuts++ }                             /* or none */
  od
}

init {
  byte i;
  atomic { run graph(); run forwarder(0); run forwarder(1); run power() };
  _nr_pr == 1;
  for (i : 1 .. STEPS) { MUST(exactly_once, copies[i] == 1 && copied[i] == messages[i]) }
}
