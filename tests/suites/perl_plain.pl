#!/usr/bin/perl
# Hashes, closures, sockets, fork with pipes, regular expressions, alarm.
use strict;
use warnings;
use Fcntl;
use Socket;
use POSIX ();
$| = 1;
my $n = 0;
sub fail { print "FAIL perl_plain: @_\n"; POSIX::_exit(1) }
sub beat {
    sysopen(my $f, $ENV{BELAY_TEST_BEAT}, O_WRONLY | O_CREAT, 0666) or fail("heartbeat: $!");
    syswrite($f, sprintf("%019d\n", $n)) == 20 or fail("heartbeat: $!");
    close $f;
}
socketpair(my $a, my $b, AF_UNIX, SOCK_STREAM, PF_UNSPEC) or fail("socketpair $!");
my $kid = fork();
if (!$kid) {
    close $a;
    $b->autoflush(1);
    while (my $l = <$b>) { chomp $l; print $b scalar reverse($l), "\n" }
    POSIX::_exit(9);
}
close $b;
$a->autoflush(1);
my %h;
my @subs = map { my $k = $_; sub { $_[0] * $k } } 1 .. 50;
until (-e $ENV{BELAY_TEST_GO}) {
    $n++;
    beat();
    $h{"key$n"} = $n;
    delete $h{"key" . ($n - 500)};
    fail("hash") if grep { $h{$_} != substr($_, 3) } keys %h;
    fail("closure") if $subs[$n % 50]->(3) != 3 * ($n % 50 + 1);
    print $a "message $n\n";
    my $r = <$a>;
    fail("socket: child is gone") unless defined $r;
    chomp $r;
    fail("socket said $r") if scalar reverse($r) ne "message $n";
    my $t = "x" x ($n % 1000);
    fail("regex") if $t !~ /^x*$/ || length($t) != $n % 1000;
    my $out = `echo $n`;
    fail("backticks") if $out != $n || $? != 0;
    select(undef, undef, undef, 0.002);
}
close $a;
waitpid($kid, 0);
fail("child status $?") if $? != 9 << 8;
print "PASS perl_plain $n rounds\n";
