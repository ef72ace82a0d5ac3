// SPDX-License-Identifier: Apache-2.0

// Does what `docker compose config` does, with the library that it does it with: reads the compose files that it is
// given, interpolates the environment, validates against the schema, and prints the result as JSON for tests.
package main

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/compose-spec/compose-go/v2/cli"
)

// Arguments: compose files; words that begin with "+" are profiles to switch on, instead of those of .env.
func main() {
	var files, profiles []string
	for _, word := range os.Args[1:] {
		if profile, found := strings.CutPrefix(word, "+"); found {
			profiles = append(profiles, profile)
		} else {
			files = append(files, word)
		}
	}
	if err := show(files, profiles); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func show(files, profiles []string) error {
	// In the order of docker compose: .env beside the file, then profiles, which it may name.
	options, err := cli.NewProjectOptions(files, cli.WithOsEnv, cli.WithEnvFiles(), cli.WithDotEnv,
		cli.WithDefaultProfiles(profiles...))
	if err != nil {
		return err
	}
	project, err := options.LoadProject(context.Background())
	if err != nil {
		return err
	}
	text, err := project.MarshalJSON()
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(append(text, '\n'))
	return err
}
